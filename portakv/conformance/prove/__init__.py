"""`portakv prove`: that compiled kernels stay inside their tensors, for every content of their inputs. Needs z3."""

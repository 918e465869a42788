#!/usr/bin/env bash
# The generic CPU kernels on Arm, without one: cross-compiled and run by qemu, they must store, gather and read
# the bytes that they do on this machine. Needs Debian's g++, g++-aarch64-linux-gnu and qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=(portakv/kernels/cpu_amx/kernels.cpp scripts/arm/digest.cpp)
flags=(-std=c++17 -O3 -ffp-contract=off -fno-trapping-math -fno-math-errno -fopenmp -DPORTAKV_ISA=generic)
flags+=(-Iportakv/kernels/cpu_amx)
g++ "${flags[@]}" "${sources[@]}" -o "$work/here"
aarch64-linux-gnu-g++ "${flags[@]}" -static "${sources[@]}" -o "$work/arm" 2>"$work/log" || { cat "$work/log"; exit 1; }
export OMP_NUM_THREADS=2
"$work/here" >"$work/here.txt"
qemu-aarch64 "$work/arm" >"$work/arm.txt"
diff "$work/here.txt" "$work/arm.txt"
echo "$(wc -l <"$work/arm.txt") digests: the same bytes on Arm"

"""Adapters that give other libraries' interfaces a portakv pool; each module needs its library installed."""

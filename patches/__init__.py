"""Changes to upstream code, one file per change.

A patch is a context manager that restores what it changed on exit. Its header names the upstream package and versions
it is for, the report or change it stands in for, and the version from which it can be deleted. Nothing here runs on
import.

This folder is installed as `hf_kvcache.patches`.
"""

"""How a kernel gets its configuration, and the tuned winners that ship with the package."""

"""Fast equivalents of definitions, one subpackage per consumer."""

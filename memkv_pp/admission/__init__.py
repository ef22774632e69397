"""Who may enter: the byte ledger, the coordinator, and what drives it."""

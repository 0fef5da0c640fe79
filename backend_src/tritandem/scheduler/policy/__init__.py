"""Who goes next: one pure function per rule, combined in `order`. No clock, no thread, no engine in here."""

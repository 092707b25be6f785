"""Why requests hit or missed: a bounded record of decisions, and the names of causes."""

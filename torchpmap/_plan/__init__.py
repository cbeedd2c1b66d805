"""What a call decides once: its plan, and the plans of its derivatives."""

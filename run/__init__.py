"""What a run is made of: its flags, problems, record, saves, plan and report."""

"""What a drafter is trained on: anchors, the teacher-forced forward, losses, and options of theirs."""

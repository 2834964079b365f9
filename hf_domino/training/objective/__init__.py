"""The training objective of a drafter: anchors, the teacher-forced forward, and losses with their options."""

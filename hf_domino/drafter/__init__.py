"""The mathematics of a drafter: context features, backbone, correction head, and the model they make."""

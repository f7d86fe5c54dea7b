"""What leaves a full cache: the policies, and the guard."""

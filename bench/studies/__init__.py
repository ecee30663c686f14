"""Studies: what distributed training does to accuracy and bytes, as pages of the documentation."""

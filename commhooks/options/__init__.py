"""What users write: values of options, checked, and the vocabulary of the front ends. Nothing here needs torch."""

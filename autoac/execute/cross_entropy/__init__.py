"""Cross entropy with one buffer of the logits' size less than torch's, or over chunks of rows; equal to the bit."""

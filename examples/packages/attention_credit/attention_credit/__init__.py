"""An advantage for envkit that scales the tokens which the policy's attention marks as decisive."""

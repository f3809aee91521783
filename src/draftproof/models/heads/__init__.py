"""Draft heads: small networks that read the target's hidden states. Pure torch; one file a family, used to serve and to train."""

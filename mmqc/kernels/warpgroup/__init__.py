"""Linears whose products are warpgroups' (Hopper), in Gluon: copies, products and epilogues of their own timing."""

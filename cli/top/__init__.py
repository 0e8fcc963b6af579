"""`headway top`: a live view of pools, engines, tenants, workflows, requests and refusals."""

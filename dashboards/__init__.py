"""What people look at: Grafana dashboards, Prometheus rules and alerts, and what loads them."""

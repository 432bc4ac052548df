"""What Ray Serve deploys: application builder, configuration, HTTP ingress and the supervisors of workers."""

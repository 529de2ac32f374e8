# What a machine does that ends a private tunnel to other clouds (WireGuard), for any cloud.

locals {
  script = templatefile("${path.module}/tunnel.sh.tftpl", {
    cloud  = var.cloud
    secret = var.secret
    python = var.python
    peers  = var.peers
    port   = 51820
  })
}

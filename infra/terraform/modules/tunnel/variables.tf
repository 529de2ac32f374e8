variable "cloud" {
  description = "Cloud of this machine: aws or tencent."
  type        = string
}

variable "secret" {
  description = "Secret with the private key."
  type        = object({ store = string, region = string, name = string })
}

variable "python" {
  description = "Python interpreter of the image, which must also have wireguard-tools and iptables."
  type        = string
  default     = "/opt/geo_ray/bin/python"
}

variable "peers" {
  description = "Other ends: public key, public address, and the network behind each."
  type        = list(object({ public_key = string, address = string, cidr = string }))

  validation {
    condition     = alltrue([for peer in var.peers : can(regex("^[A-Za-z0-9+/]{43}=$", peer.public_key)) && can(cidrhost(peer.cidr, 0))])
    error_message = "A peer needs a public key as printed by `wg pubkey`, and a network."
  }
}

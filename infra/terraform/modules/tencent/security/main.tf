# Network access: the same rules as in AWS. Connections that no rule allows are dropped.

locals {
  node_ports = {
    agents    = { protocol = "TCP", port = "6380-6385", what = "Ray: node, objects, agents, metrics" }
    processes = { protocol = "TCP", port = "10002-20999", what = "Ray: processes" }
    servers   = { protocol = "TCP", port = "32768-60999", what = "Parameter servers, bridges, ports that the system chose" }
    datagrams = { protocol = "UDP", port = "32768-60999", what = "Datagrams of bridges" }
    too_large = { protocol = "ICMP", port = "ALL", what = "A packet was too large" }
  }
  # Sorted, because a rule set changes with the order of its rules.
  inside = [for pair in setproduct(sort(keys(local.node_ports)), sort(var.cluster_cidrs)) : merge(local.node_ports[pair[0]], { cidr = pair[1] })]
}

resource "tencentcloud_security_group" "nodes" {
  name        = "${var.name}-nodes"
  description = "All nodes of the cluster"
  tags        = var.tags
}

resource "tencentcloud_security_group_rule_set" "nodes" {
  security_group_id = tencentcloud_security_group.nodes.id

  dynamic "ingress" {
    for_each = local.inside
    content {
      action      = "ACCEPT"
      cidr_block  = ingress.value.cidr
      protocol    = ingress.value.protocol
      port        = ingress.value.port
      description = ingress.value.what
    }
  }

  dynamic "egress" {
    for_each = sort(var.cluster_cidrs)
    content {
      action      = "ACCEPT"
      cidr_block  = egress.value
      protocol    = "ALL"
      port        = "ALL"
      description = "To the cluster"
    }
  }

  egress {
    action      = "ACCEPT"
    cidr_block  = "0.0.0.0/0"
    protocol    = "TCP"
    port        = "443"
    description = "HTTPS: the cloud's APIs, buckets, secrets"
  }
}

resource "tencentcloud_security_group" "head" {
  name        = "${var.name}-head"
  description = "The head, in addition to the group of all nodes"
  tags        = var.tags
}

resource "tencentcloud_security_group_rule_set" "head" {
  security_group_id = tencentcloud_security_group.head.id

  dynamic "ingress" {
    for_each = sort(var.cluster_cidrs)
    content {
      action      = "ACCEPT"
      cidr_block  = ingress.value
      protocol    = "TCP"
      port        = "6379"
      description = "Ray: the head"
    }
  }
}

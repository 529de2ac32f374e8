# Network access. Ray is protected only by a token, so the cluster's networks are the only sources.
# docs/operations/runs.md explains the ports.

locals {
  node_ports = {
    agents    = { protocol = "tcp", from = 6380, to = 6385, what = "Ray: node, objects, agents, metrics" }
    processes = { protocol = "tcp", from = 10002, to = 20999, what = "Ray: processes" }
    servers   = { protocol = "tcp", from = 32768, to = 60999, what = "Parameter servers, bridges, ports that the system chose" }
    datagrams = { protocol = "udp", from = 32768, to = 60999, what = "Datagrams of bridges" }
    # Path MTU discovery needs it: without it, links with a smaller MTU drop large packets.
    too_large = { protocol = "icmp", from = 3, to = 4, what = "A packet was too large" }
  }
  operator_ports = { ssh = 22 }
  operators      = { for pair in setproduct(keys(local.operator_ports), var.operator_cidrs) : "${pair[0]} ${pair[1]}" => pair }
}

resource "aws_ec2_managed_prefix_list" "cluster" {
  name           = "${var.name} cluster"
  address_family = "IPv4"
  max_entries    = max(10, length(var.cluster_cidrs))
  tags           = { Name = "${var.name} cluster" }

  dynamic "entry" {
    for_each = toset(var.cluster_cidrs)
    content {
      cidr = entry.value
    }
  }
}

resource "aws_security_group" "nodes" {
  name_prefix = "${var.name}-nodes-"
  description = "All nodes of the cluster"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name} nodes" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "head" {
  name_prefix = "${var.name}-head-"
  description = "The head, in addition to the group of all nodes"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name} head" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  for_each = local.node_ports

  security_group_id = aws_security_group.nodes.id
  description       = each.value.what
  ip_protocol       = each.value.protocol
  from_port         = each.value.from
  to_port           = each.value.to
  prefix_list_id    = aws_ec2_managed_prefix_list.cluster.id
  tags              = { Name = "${var.name} ${each.key}" }
}

resource "aws_vpc_security_group_ingress_rule" "head" {
  security_group_id = aws_security_group.head.id
  description       = "Ray: the head"
  ip_protocol       = "tcp"
  from_port         = 6379
  to_port           = 6379
  prefix_list_id    = aws_ec2_managed_prefix_list.cluster.id
  tags              = { Name = "${var.name} head" }
}

resource "aws_vpc_security_group_ingress_rule" "operators" {
  for_each = local.operators

  security_group_id = aws_security_group.head.id
  description       = "Operators: ${each.value[0]}"
  ip_protocol       = "tcp"
  from_port         = local.operator_ports[each.value[0]]
  to_port           = local.operator_ports[each.value[0]]
  cidr_ipv4         = each.value[1]
  tags              = { Name = "${var.name} ${each.value[0]}" }
}

resource "aws_vpc_security_group_egress_rule" "cluster" {
  security_group_id = aws_security_group.nodes.id
  description       = "To the cluster"
  ip_protocol       = "-1"
  prefix_list_id    = aws_ec2_managed_prefix_list.cluster.id
  tags              = { Name = "${var.name} cluster" }
}

resource "aws_vpc_security_group_egress_rule" "apis" {
  security_group_id = aws_security_group.nodes.id
  description       = "HTTPS: the cloud's APIs, buckets, secrets"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
  tags              = { Name = "${var.name} https" }
}

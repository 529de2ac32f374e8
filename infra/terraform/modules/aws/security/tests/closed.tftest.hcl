# Ray is not open to the world. The provider is mocked.
mock_provider "aws" {}

variables {
  name          = "trial"
  vpc_id        = "vpc-1"
  cluster_cidrs = ["10.20.0.0/16", "10.21.0.0/16"]
}

run "only_the_cluster_reaches_its_nodes" {
  command = apply

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.nodes : rule.cidr_ipv4 == null && rule.prefix_list_id == aws_ec2_managed_prefix_list.cluster.id])
    error_message = "A rule of the nodes has another source than the cluster's networks."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.head.prefix_list_id == aws_ec2_managed_prefix_list.cluster.id && aws_vpc_security_group_ingress_rule.head.cidr_ipv4 == null
    error_message = "The head is reached from elsewhere."
  }

  assert {
    condition     = toset([for entry in aws_ec2_managed_prefix_list.cluster.entry : entry.cidr]) == toset(var.cluster_cidrs)
    error_message = "The cluster's networks are others than those that were named."
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.operators) == 0
    error_message = "Somebody may log in whom nobody has named."
  }
}

run "operators_reach_ssh_and_nothing_else" {
  command = apply

  variables {
    operator_cidrs = ["203.0.113.7/32"]
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.operators : [rule.from_port, rule.to_port, rule.cidr_ipv4]] == [[22, 22, "203.0.113.7/32"]]
    error_message = "Operators reach more than SSH, or others do."
  }
}

run "the_world_is_no_operator" {
  command = plan

  variables {
    operator_cidrs = ["0.0.0.0/0"]
  }

  expect_failures = [var.operator_cidrs]
}

run "the_world_is_no_cluster" {
  command = plan

  variables {
    cluster_cidrs = ["0.0.0.0/0"]
  }

  expect_failures = [var.cluster_cidrs]
}

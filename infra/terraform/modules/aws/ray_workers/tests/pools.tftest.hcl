# Pools have the requested size and market, and encrypted disks. The provider is mocked.
mock_provider "aws" {
  mock_resource "aws_launch_template" {
    defaults = {
      id = "lt-0123456789abcdef0"
    }
  }
}

variables {
  name               = "trial"
  region             = "us"
  image_id           = "ami-1"
  subnets            = { "us-east-1a" = "subnet-1", "us-east-1b" = "subnet-2" }
  security_group_ids = ["sg-1"]
  instance_profile   = "trial-nodes"
  tags               = { "geo-ray:stack" = "trial" }
  join = {
    address = "10.20.0.10:6379"
    store   = "aws-secretsmanager"
    region  = "us-east-1"
    token   = "trial-token"
    tls     = null
    python  = "/opt/geo_ray/bin/python"
  }
  pools = {
    a = { type = "g5.xlarge", market = "spot", role = "worker", count = 2 }
    b = { type = "m5.2xlarge", market = "on_demand", role = "server", count = 1 }
  }
}

run "as_many_as_they_are_told_and_no_more" {
  command = apply

  assert {
    condition     = { for name, group in aws_autoscaling_group.this : name => [group.min_size, group.desired_capacity, group.max_size] } == { a = [0, 2, 2], b = [0, 1, 1] }
    error_message = "A pool has another size than the plan's."
  }

  assert {
    condition     = one(one(aws_autoscaling_group.this["a"].mixed_instances_policy).instances_distribution).on_demand_percentage_above_base_capacity == 0
    error_message = "A spot pool rents on demand."
  }

  assert {
    condition     = one(one(aws_autoscaling_group.this["b"].mixed_instances_policy).instances_distribution).on_demand_percentage_above_base_capacity == 100
    error_message = "A pool on demand rents on the spot market."
  }

  assert {
    condition     = alltrue([for each in aws_launch_template.this : one(one(each.block_device_mappings).ebs).encrypted == "true"])
    error_message = "A disk is not encrypted."
  }

  assert {
    condition     = alltrue([for each in aws_launch_template.this : one(each.metadata_options).http_tokens == "required"])
    error_message = "Whoever makes a machine ask for an address gets its credentials."
  }
}

run "a_count_is_a_whole_number" {
  command = plan

  variables {
    pools = { a = { type = "g5.xlarge", market = "spot", role = "worker", count = 1.5 } }
  }

  expect_failures = [var.pools]
}

# Machines that Terraform controls: one pool per type, market and role. The group of a pool replaces
# lost and preempted machines.

locals {
  zones = sort(keys(var.subnets))
}

module "boot" {
  source   = "../../boot"
  for_each = var.pools

  cloud = "aws"
  join  = var.join
  labels = {
    "geo-ray/role"               = each.value.role
    "ray.io/availability-region" = var.region
    "ray.io/market-type"         = replace(each.value.market, "_", "-")
    "ray.io/node-group"          = each.value.type
  }
}

resource "aws_launch_template" "this" {
  for_each = var.pools

  name_prefix            = substr("${var.name}-${replace(each.key, "/[^A-Za-z0-9()./_-]/", "-")}-", 0, 90)
  description            = "geo_ray: ${each.value.role} ${each.value.type} ${each.value.market}"
  image_id               = var.image_id
  instance_type          = each.value.type
  vpc_security_group_ids = var.security_group_ids
  user_data              = base64encode(module.boot[each.key].script)
  update_default_version = true

  # A machine that shuts down is terminated, so that it no longer costs.
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    name = var.instance_profile
  }

  block_device_mappings {
    device_name = var.root_device

    ebs {
      volume_size           = var.volume_gb
      volume_type           = "gp3"
      encrypted             = true
      kms_key_id            = var.kms_key_id
      delete_on_termination = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  tag_specifications {
    resource_type = "instance"
    tags          = merge(var.tags, { Name = "${var.name} ${each.key}", "geo-ray:label:geo-ray/role" = each.value.role })
  }

  tag_specifications {
    resource_type = "volume"
    tags          = merge(var.tags, { Name = "${var.name} ${each.key}" })
  }
}

resource "aws_autoscaling_group" "this" {
  for_each = var.pools

  name_prefix         = substr("${var.name}-${replace(each.key, "/[^A-Za-z0-9()./_-]/", "-")}-", 0, 90)
  min_size            = 0
  max_size            = each.value.count
  desired_capacity    = each.value.count
  vpc_zone_identifier = [for zone in local.zones : var.subnets[zone]]
  # Other zones are used when one is sold out.
  capacity_rebalance        = each.value.market == "spot"
  wait_for_capacity_timeout = "0" # the preflight of a run says what is missing, with the reason
  health_check_type         = "EC2"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = each.value.market == "spot" ? 0 : 100
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.this[each.key].id
        version            = "$Default"
      }
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Name = "${var.name} ${each.key}" })
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}

# The machine of Ray's head. Its address and the disk with its state outlive it: if the machine is
# lost, `terraform apply` creates another one with the same address.

locals {
  # Known before the machine exists, so that nodes need not wait for it.
  address = cidrhost(var.subnet.cidr, 10)
  port    = 6379
}

resource "aws_ebs_volume" "state" {
  availability_zone = var.subnet.zone
  size              = var.state_gb
  type              = "gp3"
  encrypted         = true
  kms_key_id        = var.kms_key_arn
  tags              = { Name = "${var.name} state of the head" }
}

module "boot" {
  source = "../../boot"

  cloud = "aws"
  join  = merge(var.join, { address = "${local.address}:${local.port}" })
  labels = {
    "geo-ray/role"       = "head"
    "ray.io/market-type" = "on-demand"
    "ray.io/node-group"  = var.instance_type
  }
  serves       = var.serves
  state_device = "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${replace(aws_ebs_volume.state.id, "-", "")}"
}

resource "aws_instance" "this" {
  ami                                  = var.image_id
  instance_type                        = var.instance_type
  subnet_id                            = var.subnet.id
  private_ip                           = local.address
  vpc_security_group_ids               = var.security_group_ids
  iam_instance_profile                 = var.instance_profile
  user_data                            = module.boot.script
  user_data_replace_on_change          = true
  disable_api_termination              = var.protected
  instance_initiated_shutdown_behavior = "stop"

  root_block_device {
    volume_size = var.volume_gb
    volume_type = "gp3"
    encrypted   = true
    kms_key_id  = var.kms_key_arn
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  volume_tags = merge(var.tags, { Name = "${var.name} head" })
  tags        = { Name = "${var.name} head" }

  lifecycle {
    ignore_changes = [volume_tags] # the attached volume has tags of its own
  }
}

resource "aws_volume_attachment" "state" {
  device_name                    = "/dev/sdf"
  volume_id                      = aws_ebs_volume.state.id
  instance_id                    = aws_instance.this.id
  stop_instance_before_detaching = true
}

resource "aws_cloudwatch_metric_alarm" "lost" {
  alarm_name          = "${var.name} head is ill"
  alarm_description   = "The head of ${var.name} fails its checks: training continues, nothing new can start."
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed"
  dimensions          = { InstanceId = aws_instance.this.id }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  period              = 60
  evaluation_periods  = 2
  treat_missing_data  = "breaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
}

# On broken hardware the cloud moves the machine with its address and disks.
resource "aws_cloudwatch_metric_alarm" "recover" {
  alarm_name          = "${var.name} head moves"
  alarm_description   = "The hardware under the head of ${var.name} is broken."
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed_System"
  dimensions          = { InstanceId = aws_instance.this.id }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  period              = 60
  evaluation_periods  = 2
  alarm_actions       = ["arn:${data.aws_partition.here.partition}:automate:${data.aws_region.here.name}:ec2:recover"]
}

data "aws_partition" "here" {}

data "aws_region" "here" {}

# One end of WireGuard tunnels to other clouds: a small machine with a public address. Only WireGuard's
# port is open, and only to the other ends.

locals {
  port = 51820
}

resource "aws_eip" "this" {
  domain = "vpc"
  tags   = { Name = "${var.name} tunnel" }
}

resource "aws_secretsmanager_secret" "key" {
  name                    = "geo-ray/${var.name}/tunnel"
  description             = "Private key of this end; store it with `aws secretsmanager put-secret-value`"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
  tags                    = { Name = "${var.name} tunnel" }
}

module "identity" {
  source = "../identity"

  name         = var.name
  kind         = "tunnel"
  cluster      = var.name
  secret_arns  = [aws_secretsmanager_secret.key.arn]
  kms_key_arns = [var.kms_key_arn]
}

module "script" {
  source = "../../tunnel"

  cloud  = "aws"
  secret = { store = "aws-secretsmanager", region = data.aws_region.here.name, name = aws_secretsmanager_secret.key.name }
  python = var.python
  peers  = var.peers
}

data "aws_region" "here" {}

resource "aws_security_group" "this" {
  name_prefix = "${var.name}-tunnel-"
  description = "The end of tunnels to other clouds"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name} tunnel" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "peers" {
  count = length(var.peers)

  security_group_id = aws_security_group.this.id
  description       = "WireGuard: the other end"
  ip_protocol       = "udp"
  from_port         = local.port
  to_port           = local.port
  cidr_ipv4         = "${var.peers[count.index].address}/32"
}

resource "aws_vpc_security_group_ingress_rule" "inside" {
  security_group_id = aws_security_group.this.id
  description       = "From this network into the tunnels"
  ip_protocol       = "-1"
  cidr_ipv4         = var.cidr
}

resource "aws_vpc_security_group_egress_rule" "peers" {
  count = length(var.peers)

  security_group_id = aws_security_group.this.id
  description       = "WireGuard: the other end"
  ip_protocol       = "udp"
  from_port         = local.port
  to_port           = local.port
  cidr_ipv4         = "${var.peers[count.index].address}/32"
}

resource "aws_vpc_security_group_egress_rule" "inside" {
  security_group_id = aws_security_group.this.id
  description       = "From the tunnels"
  ip_protocol       = "-1"
  cidr_ipv4         = var.cidr
}

resource "aws_vpc_security_group_egress_rule" "apis" {
  security_group_id = aws_security_group.this.id
  description       = "HTTPS: the cloud's APIs, for the key"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_instance" "this" {
  ami                         = var.image_id
  instance_type               = var.instance_type
  subnet_id                   = var.subnet_id
  vpc_security_group_ids      = [aws_security_group.this.id]
  iam_instance_profile        = module.identity.profile
  source_dest_check           = false
  user_data                   = module.script.script
  user_data_replace_on_change = true
  tags                        = { Name = "${var.name} tunnel" }

  root_block_device {
    volume_type = "gp3"
    encrypted   = true
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
}

resource "aws_eip_association" "this" {
  allocation_id = aws_eip.this.id
  instance_id   = aws_instance.this.id
}

resource "aws_route" "peers" {
  count = length(var.peers)

  route_table_id         = var.route_table_id
  destination_cidr_block = var.peers[count.index].cidr
  network_interface_id   = aws_instance.this.primary_network_interface_id
}

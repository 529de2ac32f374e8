# A region's private network: machines have no public address and accept no connection from outside.
# Buckets are reached without leaving the cloud's network.

data "aws_region" "here" {}

data "aws_availability_zones" "here" {
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

locals {
  zones = var.zones != null ? sort(var.zones) : slice(sort(data.aws_availability_zones.here.names), 0, 2)
  # The upper half of the network is divided into private subnets, one per zone; the lowest 256
  # addresses are the public subnet of the NAT gateway.
  private = { for number, zone in local.zones : zone => cidrsubnet(var.cidr, 4, 8 + number) }
  public  = cidrsubnet(var.cidr, 8, 0)
  # APIs that a machine needs without internet access.
  services = var.nat ? [] : ["ec2", "ec2messages", "kms", "secretsmanager", "ssm", "ssmmessages"]
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# The default security group allows nothing.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name} closed" }
}

resource "aws_subnet" "private" {
  for_each = local.private

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = each.value
  tags              = { Name = "${var.name} ${each.key}" }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name} private" }
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.here.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
  tags              = { Name = "${var.name} s3" }
}

# ------------------------------------------------------------------ with internet access

resource "aws_internet_gateway" "this" {
  count = var.nat || var.public_subnet ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

resource "aws_subnet" "public" {
  count = var.nat || var.public_subnet ? 1 : 0

  vpc_id            = aws_vpc.this.id
  availability_zone = local.zones[0]
  cidr_block        = local.public
  tags              = { Name = "${var.name} public" }
}

resource "aws_route_table" "public" {
  count = var.nat || var.public_subnet ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name} public" }
}

resource "aws_route" "public_out" {
  count = var.nat || var.public_subnet ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  count = var.nat || var.public_subnet ? 1 : 0

  subnet_id      = aws_subnet.public[0].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_eip" "nat" {
  count = var.nat ? 1 : 0

  domain = "vpc"
  tags   = { Name = "${var.name} nat" }
}

resource "aws_nat_gateway" "this" {
  count = var.nat ? 1 : 0

  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[0].id
  tags          = { Name = var.name }
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route" "private_out" {
  count = var.nat ? 1 : 0

  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

# ------------------------------------------------------------------ without internet access

resource "aws_security_group" "services" {
  count = var.nat ? 0 : 1

  name_prefix = "${var.name}-services-"
  description = "The cloud's APIs, for the machines of this network"
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${var.name} services" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "services" {
  count = var.nat ? 0 : 1

  security_group_id = aws_security_group.services[0].id
  description       = "HTTPS from this network"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = var.cidr
}

resource "aws_vpc_endpoint" "services" {
  for_each = toset(local.services)

  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${data.aws_region.here.name}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for subnet in aws_subnet.private : subnet.id]
  security_group_ids  = [aws_security_group.services[0].id]
  tags                = { Name = "${var.name} ${each.key}" }
}

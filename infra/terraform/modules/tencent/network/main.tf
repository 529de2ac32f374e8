# A region's private network: machines have no public address, reach the cloud's APIs through a NAT
# gateway, and accept no connection from outside.

locals {
  # One private subnet per zone in the upper half; the lowest 256 addresses are for the tunnel's end.
  private = { for number, zone in sort(var.zones) : zone => cidrsubnet(var.cidr, 4, 8 + number) }
}

resource "tencentcloud_vpc" "this" {
  name       = var.name
  cidr_block = var.cidr
  tags       = var.tags
}

resource "tencentcloud_route_table" "private" {
  name   = "${var.name}-private"
  vpc_id = tencentcloud_vpc.this.id
  tags   = var.tags
}

resource "tencentcloud_subnet" "private" {
  for_each = local.private

  name              = "${var.name}-${each.key}"
  vpc_id            = tencentcloud_vpc.this.id
  availability_zone = each.key
  cidr_block        = each.value
  route_table_id    = tencentcloud_route_table.private.id
  tags              = var.tags
}

resource "tencentcloud_subnet" "public" {
  name              = "${var.name}-public"
  vpc_id            = tencentcloud_vpc.this.id
  availability_zone = sort(var.zones)[0]
  cidr_block        = cidrsubnet(var.cidr, 8, 0)
  tags              = var.tags
}

resource "tencentcloud_eip" "nat" {
  name                       = "${var.name}-nat"
  internet_charge_type       = "TRAFFIC_POSTPAID_BY_HOUR"
  internet_max_bandwidth_out = var.nat_mbps
  tags                       = var.tags
}

resource "tencentcloud_nat_gateway" "this" {
  name             = var.name
  vpc_id           = tencentcloud_vpc.this.id
  bandwidth        = 100
  max_concurrent   = 1000000
  assigned_eip_set = [tencentcloud_eip.nat.public_ip]
  tags             = var.tags
}

resource "tencentcloud_route_table_entry" "out" {
  route_table_id         = tencentcloud_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  next_type              = "NAT"
  next_hub               = tencentcloud_nat_gateway.this.id
  description            = "The cloud's APIs"
}

# A private link between two regions' networks. Peering is not transitive: a stack needs one per
# pair, which costs only its traffic. With more than about ten regions use a transit gateway.

data "aws_region" "to" {
  provider = aws.to
}

resource "aws_vpc_peering_connection" "this" {
  provider = aws.from

  vpc_id      = var.from.vpc_id
  peer_vpc_id = var.to.vpc_id
  peer_region = data.aws_region.to.name
  auto_accept = false
  tags        = { Name = var.name }
}

resource "aws_vpc_peering_connection_accepter" "this" {
  provider = aws.to

  vpc_peering_connection_id = aws_vpc_peering_connection.this.id
  auto_accept               = true
  tags                      = { Name = var.name }
}

resource "aws_route" "from" {
  provider = aws.from

  route_table_id            = var.from.route_table_id
  destination_cidr_block    = var.to.cidr
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.this.id
}

resource "aws_route" "to" {
  provider = aws.to

  route_table_id            = var.to.route_table_id
  destination_cidr_block    = var.from.cidr
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.this.id
}

output "id" {
  value = aws_vpc_peering_connection_accepter.this.id
}

output "name" {
  value = tencentcloud_cos_bucket.this.bucket
}

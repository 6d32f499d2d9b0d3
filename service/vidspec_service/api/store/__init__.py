"""What is kept between requests: decoded clips and uploaded videos."""

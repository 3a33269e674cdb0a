//! Prometheus' text form (exposition format 0.0.4).

use std::fmt::{Display, Write};

/// One metric of a page, with its samples.
#[derive(Debug)]
pub struct Metric<'a> {
    page: &'a mut String,
    name: String,
}

impl<'a> Metric<'a> {
    /// Begins it. `kind` is one of `counter`, `gauge`, `histogram` and `untyped`.
    pub fn new(page: &'a mut String, name: impl Into<String>, kind: &str, help: &str) -> Metric<'a> {
        let name = name.into();
        // Writing to a String does not fail, here and below.
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Metric { page, name }
    }

    /// A sample.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Metric<'a> {
        self.sample_of("", labels, value)
    }

    /// One of the series of which a histogram consists.
    pub fn sample_of(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) -> &mut Metric<'a> {
        let _ = write!(self.page, "{}{suffix}", self.name);
        for (number, (name, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.page, "{}{name}=\"{value}\"", if number == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.page, "{} {value}", if labels.is_empty() { "" } else { "}" });
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_what_prometheus_reads() {
        let mut page = String::new();
        Metric::new(&mut page, "up", "gauge", "Whether it is.")
            .sample(&[], 1)
            .sample(&[("a", "b\"\\\n"), ("c", "")], 0.5);
        Metric::new(&mut page, "wait_seconds", "histogram", "How long.").sample_of("_bucket", &[("le", "+Inf")], 2);
        assert_eq!(
            page,
            "# HELP up Whether it is.\n# TYPE up gauge\nup 1\nup{a=\"b\\\"\\\\\\n\",c=\"\"} 0.5\n\
             # HELP wait_seconds How long.\n# TYPE wait_seconds histogram\nwait_seconds_bucket{le=\"+Inf\"} 2\n"
        );
    }
}

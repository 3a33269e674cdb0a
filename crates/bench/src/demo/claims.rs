//! What the demonstration claims: each line is printed with what code found, and failed lines decide how it ends.

/// The claims so far.
#[derive(Debug, Default)]
pub struct Claims {
    held: usize,
    failed: Vec<String>,
}

impl Claims {
    /// Prints a claim and whether it holds.
    pub fn add(&mut self, held: bool, claim: impl Into<String>) {
        let claim = claim.into();
        say!("  [{}] {claim}", if held { " ok " } else { "FAIL" });
        if held { self.held += 1 } else { self.failed.push(claim) }
    }

    /// How many held.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Those that did not hold.
    pub fn failed(&self) -> &[String] {
        &self.failed
    }
}

/// A number as people read it: 1234567 is "1 234 567".
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1 000"), (123_456, "123 456"), (1_234_567, "1 234 567")]
        {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn one_failed_claim_is_remembered() {
        let mut claims = Claims::default();
        claims.add(true, "water is wet");
        claims.add(false, "fire is cold");
        assert_eq!((claims.held(), claims.failed()), (1, &["fire is cold".to_owned()][..]));
    }
}

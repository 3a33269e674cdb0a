//! By which method a clone is made, and why.

use super::{MethodName, copy, lazy, reflink};
use crate::CloneError;
use crate::plan::Plan;

/// A method and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The method.
    pub name: MethodName,
    /// Why, for a person, as in `lazy: the file system ext4 cannot share blocks`.
    pub reason: String,
}

/// The method that was asked for, or the best that is possible here. It tries: small nameless files are made and vanish
/// again. Blocks for moments.
///
/// # Errors
/// [`CloneError::Impossible`] when what was asked for is not possible.
pub fn choose(requested: Option<MethodName>, plan: &Plan) -> Result<Choice, CloneError> {
    let obstacle = |method| match method {
        MethodName::Reflink => reflink::obstacle(plan),
        MethodName::Lazy => lazy::obstacle(plan),
        MethodName::Copy => copy::obstacle(plan),
        MethodName::Fork => Some("this server is a process; those in machines are forked".to_owned()),
    };
    decide(requested, obstacle, || reflink::merit(plan))
}

fn decide(
    requested: Option<MethodName>,
    obstacle: impl Fn(MethodName) -> Option<String>,
    merit: impl Fn() -> String,
) -> Result<Choice, CloneError> {
    if let Some(method) = requested {
        return match obstacle(method) {
            Some(reason) => Err(CloneError::Impossible { method, reason }),
            None => Ok(Choice { name: method, reason: format!("{method}: it was asked for") }),
        };
    }
    let mut obstacles = Vec::new();
    for method in MethodName::ALL {
        match obstacle(method) {
            None if obstacles.is_empty() => {
                return Ok(Choice { name: method, reason: format!("{method}: {}", merit()) });
            }
            None => return Ok(Choice { name: method, reason: format!("{method}: {}", obstacles.join("; ")) }),
            Some(reason) => obstacles.push(reason),
        }
    }
    Err(CloneError::Impossible { method: MethodName::Copy, reason: obstacles.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(requested: Option<MethodName>, possible: &[MethodName]) -> Result<String, String> {
        let obstacle = |method| (!possible.contains(&method)).then(|| format!("no {method}"));
        let choice = decide(requested, obstacle, || "they share".to_owned()).map_err(|error| error.to_string())?;
        assert!(choice.reason.starts_with(&format!("{}: ", choice.name)));
        Ok(choice.reason)
    }

    #[test]
    fn the_best_possible_way_is_chosen_and_what_stood_against_better_ones_is_said() {
        use MethodName::*;
        let ok = |reason: &str| Ok(reason.to_owned());
        assert_eq!(decided(None, &[Copy, Lazy, Reflink]), ok("reflink: they share"));
        assert_eq!(decided(None, &[Copy, Lazy]), ok("lazy: no reflink"));
        assert_eq!(decided(None, &[Copy]), ok("copy: no reflink; no lazy"));
        assert_eq!(decided(Some(Copy), &[Copy, Lazy, Reflink]), ok("copy: it was asked for"));
        assert_eq!(decided(Some(Lazy), &[Copy]), Err("the method lazy is not possible: no lazy".to_owned()));
        assert!(decided(None, &[]).is_err());
    }
}

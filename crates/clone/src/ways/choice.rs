//! Which way a clone is made, and why.

use super::{WayName, copy, lazy, reflink};
use crate::CloneError;
use crate::plan::Plan;

/// A way and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The way.
    pub name: WayName,
    /// Why, for a person, as in `lazy: the file system ext4 cannot share blocks`.
    pub reason: String,
}

/// The way that was asked for, or the best that is possible here. It tries: small nameless files are made and vanish
/// again. Blocks for moments.
///
/// # Errors
/// [`CloneError::Impossible`] when what was asked for is not possible.
pub fn choose(requested: Option<WayName>, plan: &Plan) -> Result<Choice, CloneError> {
    let obstacle = |way| match way {
        WayName::Reflink => reflink::obstacle(plan),
        WayName::Lazy => lazy::obstacle(plan),
        WayName::Copy => copy::obstacle(plan),
    };
    decide(requested, obstacle, || reflink::merit(plan))
}

fn decide(
    requested: Option<WayName>,
    obstacle: impl Fn(WayName) -> Option<String>,
    merit: impl Fn() -> String,
) -> Result<Choice, CloneError> {
    if let Some(way) = requested {
        return match obstacle(way) {
            Some(reason) => Err(CloneError::Impossible { way, reason }),
            None => Ok(Choice { name: way, reason: format!("{way}: it was asked for") }),
        };
    }
    let mut obstacles = Vec::new();
    for way in WayName::ALL {
        match obstacle(way) {
            None if obstacles.is_empty() => return Ok(Choice { name: way, reason: format!("{way}: {}", merit()) }),
            None => return Ok(Choice { name: way, reason: format!("{way}: {}", obstacles.join("; ")) }),
            Some(reason) => obstacles.push(reason),
        }
    }
    Err(CloneError::Impossible { way: WayName::Copy, reason: obstacles.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(requested: Option<WayName>, possible: &[WayName]) -> Result<String, String> {
        let obstacle = |way| (!possible.contains(&way)).then(|| format!("no {way}"));
        let choice = decide(requested, obstacle, || "they share".to_owned()).map_err(|error| error.to_string())?;
        assert!(choice.reason.starts_with(&format!("{}: ", choice.name)));
        Ok(choice.reason)
    }

    #[test]
    fn the_best_possible_way_is_chosen_and_what_stood_against_better_ones_is_said() {
        use WayName::*;
        let ok = |reason: &str| Ok(reason.to_owned());
        assert_eq!(decided(None, &[Copy, Lazy, Reflink]), ok("reflink: they share"));
        assert_eq!(decided(None, &[Copy, Lazy]), ok("lazy: no reflink"));
        assert_eq!(decided(None, &[Copy]), ok("copy: no reflink; no lazy"));
        assert_eq!(decided(Some(Copy), &[Copy, Lazy, Reflink]), ok("copy: it was asked for"));
        assert_eq!(decided(Some(Lazy), &[Copy]), Err("the way lazy is not possible: no lazy".to_owned()));
        assert!(decided(None, &[]).is_err());
    }
}

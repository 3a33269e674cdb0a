//! The guest's users, as `/etc/passwd` has them.

use super::replies::{Result, failed, malformed};

/// A user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) user_id: u32,
    pub(crate) group_id: u32,
    pub(crate) home: String,
}

/// The user of that name.
pub(crate) fn find(name: &str) -> Result<User> {
    let users = std::fs::read_to_string("/etc/passwd").map_err(|error| failed("reading /etc/passwd", error))?;
    users
        .lines()
        .find_map(|line| parse(line).filter(|user| user.name == name))
        .ok_or_else(|| malformed(format!("no user {name}")))
}

fn parse(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, user_id, group_id, _, home, _] = fields[..] else { return None };
    Some(User {
        name: name.to_string(),
        user_id: user_id.parse().ok()?,
        group_id: group_id.parse().ok()?,
        home: home.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_passwd_is_a_user() {
        let user = parse("postgres:x:101:102:PostgreSQL administrator,,,:/var/lib/postgresql:/bin/bash").unwrap();
        assert_eq!((user.user_id, user.group_id, user.home.as_str()), (101, 102, "/var/lib/postgresql"));
        assert_eq!(parse("postgres:x:many:102::/:"), None);
        assert_eq!(parse(""), None);
    }
}

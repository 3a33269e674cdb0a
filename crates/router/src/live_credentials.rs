//! Credentials of the roles that have sessions. Sessions of one role share them: one that has logged in before the
//! role's password was changed gets further back ends with what a later log-in has proved.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::authentication::ScramKeys;
use crate::backend::Credentials;

/// Credentials by the role's number and its name, which it may change.
#[derive(Debug, Default)]
pub struct LiveCredentials {
    of_roles: Mutex<HashMap<(u32, String), Weak<Credentials>>>,
}

impl LiveCredentials {
    /// Those of a role whose client has just proved that it knows the password.
    pub fn proved(&self, user: String, role: u32, keys: ScramKeys) -> Arc<Credentials> {
        let mut of_roles = self.of_roles.lock().expect("no code panics while it holds this lock");
        let key = (role, user.clone());
        if let Some(credentials) = of_roles.get(&key).and_then(Weak::upgrade) {
            credentials.renew(keys);
            return credentials;
        }
        of_roles.retain(|_, credentials| credentials.strong_count() > 0);
        let credentials = Arc::new(Credentials::proved(user, role, keys));
        of_roles.insert(key, Arc::downgrade(&credentials));
        credentials
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(byte: u8) -> ScramKeys {
        ScramKeys::derive(&[byte], b"salt", 1).expect("derived")
    }

    #[test]
    fn sessions_of_one_role_share_credentials_while_there_are_any() {
        let live = LiveCredentials::default();
        let first = live.proved("guest".to_owned(), 7, keys(1));
        let second = live.proved("guest".to_owned(), 7, keys(2));
        assert!(Arc::ptr_eq(&first, &second));
        // Made anew under its name, or renamed, a role is another one, or logs in by another name.
        for (user, role) in [("guest", 8), ("visitor", 7)] {
            assert!(!Arc::ptr_eq(&first, &live.proved(user.to_owned(), role, keys(3))), "{user} {role}");
        }
        drop((first, second));
        let _last = live.proved("guest".to_owned(), 7, keys(4));
        assert_eq!(live.of_roles.lock().expect("whole").len(), 1, "nobody's are kept");
    }
}

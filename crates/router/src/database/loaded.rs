//! A database's catalog as a server gives it, without waiting for who has locked what it tells of.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};

use crate::backend::{Backend, BackendError, Row};
use crate::sql::{Catalog, Objects, Part, Scope};
use crate::wire::sqlstate;

/// How long the catalog waits for a lock. Who holds it may wait for the catalog itself, which PostgreSQL cannot see.
const CATALOG_LOCK_TIMEOUT: &str = "SET lock_timeout = '100ms'";
/// So often for what cannot be left out: tables of PostgreSQL's own catalog.
const CATALOG_LOCK_TRIES_MAX: u32 = 400;

/// A catalog as a server has just given it.
pub(super) struct Loaded {
    pub(super) catalog: Catalog,
    /// Of the users' objects in it.
    pub(super) fingerprint: u64,
    /// Something was locked.
    pub(super) is_partial: bool,
}

impl Loaded {
    /// What users have made, beside what `initdb` has.
    pub(super) async fn beside(builtin: Arc<Objects>, backend: &mut Backend) -> Result<Loaded, BackendError> {
        let (user, fingerprint) = load(backend, Scope::User).await?;
        let is_partial = user.is_partial();
        Ok(Loaded { catalog: Catalog::new(builtin, user), fingerprint, is_partial })
    }
}

/// The objects of one scope, and the fingerprint of their rows. It does not wait for who has locked one of users'.
pub(super) async fn load(backend: &mut Backend, scope: Scope) -> Result<(Objects, u64), BackendError> {
    let (mut objects, mut fingerprint) = (Objects::default(), 0_u64);
    let mut answers = ask(backend, scope).await;
    for _ in 1..CATALOG_LOCK_TRIES_MAX {
        match &answers {
            Err(BackendError::Sql { fields, .. }) if fields.code == sqlstate::LOCK_NOT_AVAILABLE => {
                let unread = if scope == Scope::User { Scope::UserUnread } else { scope };
                answers = ask(backend, unread).await;
            }
            _ => break,
        }
    }
    let answers = answers?;
    for (part, rows) in Part::ALL.into_iter().zip(answers.into_iter().skip(1)) {
        for row in rows {
            fingerprint = fingerprint.wrapping_add(fingerprint_of(part, &row));
            objects.add(part, &row).map_err(|error| BackendError::Login {
                server: backend.server.name.clone(),
                reason: format!("its catalog cannot be read: {error}"),
            })?;
        }
    }
    Ok((objects, fingerprint))
}

/// The rows of all parts, behind none of the setting that is made first.
async fn ask(backend: &mut Backend, scope: Scope) -> Result<Vec<Vec<Row>>, BackendError> {
    let queries = Part::ALL.map(|part| part.query(scope));
    let statements = std::iter::once(CATALOG_LOCK_TIMEOUT).chain(queries.iter().map(String::as_str));
    backend.pipeline(&statements.collect::<Vec<_>>()).await
}

/// Rows come in any order, so theirs are added up. Nobody outside can find two that are alike: the keys are this
/// process'.
pub(super) fn fingerprint_of(part: Part, row: &[Option<String>]) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one((part as u8, row))
}

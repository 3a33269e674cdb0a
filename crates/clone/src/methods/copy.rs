//! PostgreSQL's base backup: works everywhere, the clone answers when all is copied.

use std::path::PathBuf;
use std::time::Duration;

use onecopy_postgres::{BaseBackup, Binaries, Directory, PostgresError, TablespaceMapping};

use super::{CloneMethod, MakeFuture, MethodName, PreparedClone, Report};
use crate::CloneError;
use crate::image::check_whole;
use crate::plan::Plan;
use crate::recovery::slot;
use crate::target::CloneLocation;

/// The method `copy`.
#[derive(Debug, Clone)]
pub struct Copy {
    /// The programs.
    pub binaries: Binaries,
}

impl CloneMethod for Copy {
    fn name(&self) -> MethodName {
        MethodName::Copy
    }

    fn obstacle(&self, plan: &Plan) -> Option<String> {
        obstacle(plan)
    }

    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a> {
        Box::pin(async move {
            let mut made = Vec::with_capacity(plans.len());
            for plan in plans {
                made.push(self.make_one(plan, report).await);
            }
            made
        })
    }
}

/// None: it is the method that is always there.
pub(super) fn obstacle(_plan: &Plan) -> Option<String> {
    None
}

impl Copy {
    async fn make_one(&self, plan: &Plan, report: Report<'_>) -> Result<PreparedClone, CloneError> {
        let location = CloneLocation::of(plan)?;
        location.check_free()?;
        let source = &plan.source.data_directory;
        check_whole(&Directory::open(source).map_err(CloneError::file("open", source))?)?;
        // A base backup takes one of this name for its own, left by a copy that was interrupted.
        slot::check_free(&plan.source, &plan.slot).await?;
        let backup =
            BaseBackup { binaries: self.binaries.clone(), user: location.user.clone(), slot: plan.slot.clone() };
        let tablespaces = tablespaces(plan, &location).await?;
        let progress = |progress| report(plan, progress);
        backup.make_mapped(plan.source.replication(), &location.directory, &tablespaces, &progress).await?;
        Ok(PreparedClone { plan: plan.clone(), consistent_at: None, pause: Duration::ZERO, inherited: Vec::new() })
    }
}

/// Where each tablespace of the source goes. One inside the data directory is copied with it.
async fn tablespaces(plan: &Plan, location: &CloneLocation) -> Result<Vec<TablespaceMapping>, CloneError> {
    let client = plan.source.connection.connect().await?;
    let query = "SELECT oid, pg_tablespace_location(oid) FROM pg_tablespace";
    let rows = client.query(query, &[]).await.map_err(PostgresError::sql("list the tablespaces"))?;
    let all = rows.iter().map(|row| (row.get::<_, u32>(0), PathBuf::from(row.get::<_, String>(1))));
    let elsewhere = all.filter(|(_, location)| location.is_absolute());
    Ok(elsewhere
        .map(|(oid, from)| TablespaceMapping { from, to: location.tablespaces.join(oid.to_string()) })
        .collect())
}

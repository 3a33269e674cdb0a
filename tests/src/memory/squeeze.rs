//! A host that takes memory away: a server in a control group whose limit falls below what it has.

use anyhow::ensure;

use crate::memory::MIB;
use crate::memory::harness::{Harness, Plan};
use crate::memory::pages::{self, PAGE_BYTES};
use crate::memory::pgbench::{Pgbench, Script, Until};
use crate::memory::swap_file::SwapFile;
use onecopy_testing::control_group::{ControlGroup, Usage};

/// The pool before.
pub const CEILING_BYTES: u64 = 256 * MIB;
/// What the server may use afterwards, all in all.
pub const LIMIT_BYTES: u64 = 160 * MIB;
/// Its pool then: half of that.
pub const TARGET_BYTES: u64 = 80 * MIB;
/// Memory of processes that sleep, which the kernel may move at any time.
pub const SWAPPED_BYTES_MAX: u64 = 8 * MIB;
/// Of a pool that does not give way.
pub const COLLAPSED_BYTES_MIN: u64 = 64 * MIB;
/// More than the pool.
const ROWS: u64 = 240 * MIB / PAGE_BYTES;
/// Others on the machine may use it, too.
const SWAP_BYTES: u64 = 2048 * MIB;
const CLIENTS: u32 = 2;
const LOAD: Until = Until::Seconds(4);

/// A server with a full pool, in a group without a limit as yet. Fields go in their order: what is swapped out goes
/// with the server.
#[derive(Debug)]
pub struct Squeezed {
    /// The server.
    pub harness: Harness,
    group: ControlGroup,
    _swap: SwapFile,
}

impl Squeezed {
    /// Starts one and fills its pool.
    ///
    /// # Errors
    ///
    /// Whatever is missing for it.
    pub async fn full_server(plan: Plan) -> anyhow::Result<Squeezed> {
        let swap = SwapFile::begin(SWAP_BYTES)?;
        let harness = Harness::start(plan).await?;
        let group = ControlGroup::make()?;
        // Others on the machine may need memory before it is this one's turn.
        group.set_swapped(false)?;
        group.take(&harness.leader().server)?;
        pages::make(harness.leader(), ROWS).await?;
        pages::read_all(harness.leader()).await?;
        let usage = group.usage()?;
        ensure!(usage.swap_bytes <= SWAPPED_BYTES_MAX, "before anything is taken away: {usage:?}");
        Ok(Squeezed { harness, group, _swap: swap })
    }

    /// Takes the memory away and lets clients read all there is.
    ///
    /// # Errors
    ///
    /// A client met an error, or the group is over its limit.
    pub async fn squeeze(&self) -> anyhow::Result<Usage> {
        self.group.set_swapped(true)?;
        self.group.limit(LIMIT_BYTES).await?;
        Pgbench::run(self.harness.leader(), &Script::uniform_pages(ROWS), CLIENTS, LOAD).await?;
        let usage = self.group.usage()?;
        ensure!(usage.total_bytes <= LIMIT_BYTES, "over the limit: {usage:?}");
        Ok(usage)
    }
}

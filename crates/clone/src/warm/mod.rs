//! Which pages of a source are hot, so that a clone has them first.
//!
//! The source knows them: its shared buffers with how often each was used ([`HotPages`]), and below them the kernel's
//! page cache ([`residency`]). [`hot_ranges`] puts both into one order for the background of a filling. [`autoprewarm`]
//! makes the clone's own server read the same pages into its shared buffers when it starts, by PostgreSQL's own module
//! and without a word in its catalogs.
//!
//! All of this is a guess about the future: what fails here makes a clone slower for a while, never wrong. It is
//! logged, not returned.

pub mod autoprewarm;
mod buffers;
mod prewarming;
mod ranges;
mod relation_file;
mod residency;

use std::path::Path;
use std::sync::Arc;

use onecopy_postgres::ConnectionParameters;

pub use buffers::{HotPage, HotPages};
pub use prewarming::Prewarming;

use crate::ByteRange;
use crate::image::{FileNumber, Image};

/// How many ranges a list has at most; the hottest stay. One range is a run of pages near each other, in a page cache
/// 256 KiB and more.
pub const RANGES_MAX: usize = 1 << 16;

/// The ranges of an image that its source uses most, hottest first: by the shared buffers' usage counts, then what is
/// in the page cache. Ranges do not overlap. `data_directory` is the source's.
pub async fn hot_ranges(
    connection: &ConnectionParameters,
    image: &Arc<Image>,
    data_directory: &Path,
) -> Vec<(FileNumber, ByteRange)> {
    let pages = match HotPages::of_source(connection).await {
        Ok(pages) => pages,
        Err(reason) => {
            tracing::warn!(
                %reason,
                "the source's shared buffers are not known: its page cache alone tells what is hot"
            );
            HotPages::default()
        }
    };
    let (image, data_directory) = (Arc::clone(image), data_directory.to_owned());
    // Where it is called there is one thread, by whose beats one sees that the process lives.
    let ranges = tokio::task::spawn_blocking(move || pages.ranges_with_page_cache(&image, &data_directory)).await;
    ranges.unwrap_or_else(|error| {
        tracing::error!(%error, "what is hot is not known");
        Vec::new()
    })
}

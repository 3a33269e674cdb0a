//! A served disk's counters in Prometheus' text form.

use std::path::Path;

use onecopy_control::metrics::Metric;

use crate::protocol::{PageMapStatus, ServedDisk, Transport};

/// All of them, with the disk's directory as the label `disk`.
pub(crate) fn text(directory: &Path, served: &ServedDisk) -> String {
    let mut page = Page { text: String::new(), disk: directory.display().to_string() };
    let attached = u64::from(served.is_attached);
    page.gauge("onecopy_disk_attached", "1 while this server has the disk.", attached);
    if let Some(disk) = &served.disk {
        page.disk(disk);
    }
    if let Some(hydration) = &served.hydration {
        page.gauge("onecopy_disk_hydration_copied_bytes", "Bytes of the base that are here.", hydration.copied_bytes);
        page.gauge("onecopy_disk_hydration_size_bytes", "Bytes of the base that shall be here.", hydration.total_bytes);
        let troubled = u64::from(hydration.trouble.is_some());
        page.gauge("onecopy_disk_hydration_troubled", "1 while the base cannot be reached.", troubled);
    }
    if let Some(map) = &served.page_map {
        page.page_map(map);
    }
    page.transports(&served.transports);
    page.text
}

struct Page {
    text: String,
    disk: String,
}

impl Page {
    fn disk(&mut self, disk: &onecopy_disk::Statistics) {
        self.gauge("onecopy_disk_size_bytes", "Size that the guest sees.", disk.size_bytes);
        self.gauge("onecopy_disk_allocated_bytes", "Data in the disk's own files.", disk.allocated_bytes);
        self.gauge("onecopy_disk_current_bytes", "Of that, the current content's.", disk.current_bytes);
        self.gauge("onecopy_disk_snapshots", "Named snapshots.", disk.snapshots);
        self.gauge("onecopy_disk_retained_epochs", "Epochs cut and not released.", disk.retained_epochs);
        self.gauge("onecopy_disk_journal_bytes", "Journal since the last checkpoint.", disk.journal_bytes);
        self.gauge("onecopy_disk_pending_requests", "Requests in the disk's workers.", disk.pending_requests);
        self.counter("onecopy_disk_checkpoints_total", "Checkpoints written.", disk.checkpoints);
        self.counter("onecopy_disk_reads_total", "Reads.", disk.reads);
        self.counter("onecopy_disk_read_bytes_total", "Bytes read.", disk.read_bytes);
        self.counter("onecopy_disk_writes_total", "Writes.", disk.writes);
        self.counter("onecopy_disk_written_bytes_total", "Bytes written.", disk.written_bytes);
        self.counter("onecopy_disk_flushes_total", "Flushes asked for.", disk.flushes);
        self.counter("onecopy_disk_synchronizations_total", "Flushes that reached the files.", disk.synchronizations);
        self.counter("onecopy_disk_discards_total", "Discards and write-zeroes.", disk.discards);
        self.counter("onecopy_disk_discarded_bytes_total", "Bytes discarded or zeroed.", disk.discarded_bytes);
    }

    fn page_map(&mut self, status: &PageMapStatus) {
        let map = &status.figures;
        self.gauge("onecopy_pagemap_known_blocks", "Blocks whose content is known.", map.known_blocks);
        self.gauge("onecopy_pagemap_memory_bytes", "Memory set aside.", map.memory_bytes);
        self.gauge("onecopy_pagemap_scanned_bytes", "How far the background scan is.", status.scanned_bytes);
        self.counter("onecopy_pagemap_recorded_total", "Blocks recorded.", map.recorded);
        let found = map.found_zero + map.found_by_hint + map.found_by_index;
        let by = [
            ("zero", map.found_zero),
            ("hint", map.found_by_hint),
            ("index", map.found_by_index),
            ("nothing", map.lookups.saturating_sub(found)),
        ];
        let help = "Pages asked for, by what found them.";
        let mut lookups = Metric::new(&mut self.text, "onecopy_pagemap_lookups_total", "counter", help);
        for (found, value) in by {
            lookups.sample(&[("disk", &self.disk), ("found", found)], value);
        }
        self.counter("onecopy_pagemap_replaced_total", "Entries pushed out of the index.", map.replaced_entries);
        self.counter("onecopy_pagemap_dropped_total", "Extents of 4 MiB forgotten.", map.dropped_extents);
    }

    /// One metric for all counters of all transports: each transport names its own.
    fn transports(&mut self, transports: &[Transport]) {
        if transports.is_empty() {
            return;
        }
        let (name, help) = ("onecopy_disk_transport_figure", "Figures of a transport, by name.");
        let mut figures = Metric::new(&mut self.text, name, "untyped", help);
        for transport in transports {
            let Some(counters) = transport.counters.as_object() else { continue };
            for (figure, value) in counters {
                let Some(value) = value.as_u64() else { continue };
                let of = [("transport", transport.kind.as_str()), ("address", &transport.address), ("figure", figure)];
                figures.sample(&[&[("disk", self.disk.as_str())], &of[..]].concat(), value);
            }
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        Metric::new(&mut self.text, name, "gauge", help).sample(&[("disk", &self.disk)], value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        Metric::new(&mut self.text, name, "counter", help).sample(&[("disk", &self.disk)], value);
    }
}

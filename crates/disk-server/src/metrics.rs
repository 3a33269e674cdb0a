//! A served disk's counters in Prometheus' text form.

use std::fmt::Write;
use std::path::Path;

use crate::protocol::{PageMapStatus, ServedDisk, Transport};

/// All of them, with the disk's directory as the label `disk`.
pub(crate) fn text(directory: &Path, served: &ServedDisk) -> String {
    let mut page = Page { text: String::new(), disk: escape(&directory.display().to_string()) };
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
        self.head("onecopy_pagemap_lookups_total", "Pages asked for, by what found them.", "counter");
        let found = map.found_zero + map.found_by_hint + map.found_by_index;
        let by = [
            ("zero", map.found_zero),
            ("hint", map.found_by_hint),
            ("index", map.found_by_index),
            ("nothing", map.lookups.saturating_sub(found)),
        ];
        for (found, value) in by {
            self.line("onecopy_pagemap_lookups_total", &format!(",found=\"{found}\""), value);
        }
        self.counter("onecopy_pagemap_replaced_total", "Entries pushed out of the index.", map.replaced_entries);
        self.counter("onecopy_pagemap_dropped_total", "Extents of 4 MiB forgotten.", map.dropped_extents);
    }

    /// One metric for all counters of all transports: each transport names its own.
    fn transports(&mut self, transports: &[Transport]) {
        let name = "onecopy_disk_transport_figure";
        if !transports.is_empty() {
            self.head(name, "Figures of a transport, by name.", "untyped");
        }
        for transport in transports {
            let Some(counters) = transport.counters.as_object() else { continue };
            for (figure, value) in counters {
                let Some(value) = value.as_u64() else { continue };
                let (kind, address) = (&transport.kind, escape(&transport.address));
                self.line(name, &format!(",transport=\"{kind}\",address=\"{address}\",figure=\"{figure}\""), value);
            }
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "gauge");
        self.line(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "counter");
        self.line(name, "", value);
    }

    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing into a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: u64) {
        let _ = writeln!(self.text, "{name}{{disk=\"{}\"{labels}}} {value}", self.disk);
    }
}

/// A label's value, as Prometheus' text form wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

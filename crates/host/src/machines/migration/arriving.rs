//! Machines that come from other hosts: their directories, and what is left of those that did not come.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_hypervisor::Qemu;
use onecopy_machine::keeper::check_detection;
use onecopy_machine::migration::{
    self, Arrival, ArrivalSecrets, ArrivalState, Departure, HostOrder, ReceiveOrder, SharedDisk, Verdict,
};
use onecopy_machine::{
    BridgedNetwork, Endpoint, Etcd, Forward, GuestImage, Machine, MachineConfiguration, MachineError, MachineHome,
    MachineName, hypervisor_failed,
};

use super::super::Machines;
use super::super::decision::{GO_TIMEOUT, LOOK_INTERVAL};
use super::super::registry::{blocking, keep_alone};
use crate::HostError;

/// How long a copy of a machine may take to end that its host sends anew.
const VOID_TIMEOUT: Duration = Duration::from_secs(20);

impl Machines {
    /// Makes the directory of a machine that another host sends, for its keeper.
    ///
    /// # Errors
    /// What is not possible here, with the remedy.
    pub(crate) async fn make_arriving(&self, order: &ReceiveOrder, keys: &Path) -> Result<Machine, HostError> {
        let name = &order.which.name;
        if name.is_of_clusters() {
            return Err(MachineError::NameOfClusters { name: name.clone() }.into());
        }
        if !order.which.has_token() {
            let (machine, to) = (name.to_string(), "this host".to_owned());
            return Err(MachineError::Migration { machine, to, reason: "its order has no token".to_owned() }.into());
        }
        check_detection(order.detection_s).map_err(|reason| {
            let (machine, to) = (name.to_string(), "this host".to_owned());
            MachineError::Protection { machine, to, reason }
        })?;
        let etcd = self.check_etcd(order, keys).await?;
        let home = MachineHome::of(&self.directory.machines(), name);
        if home.is_made() {
            Machine::new(home.clone(), self.user.clone()).resolve_copy().await?;
            self.wait_void(&home, order).await;
        }
        if home.is_made() && !self.may_be_replaced(&home) {
            return Err(MachineError::Exists { name: name.clone() }.into());
        }
        let image = {
            let digest = order.image.clone();
            blocking::<_, MachineError>("looking for an image", move || GuestImage::with_boot_digest(&digest)).await?
        };
        let qemu = Qemu::find().map_err(|error| hypervisor_failed(name, error))?;
        MachineConfiguration::check_checkpoints(qemu.version())?;
        self.directory.make_root()?;
        self.directory.make_machines()?;
        let _ports = self.lock_ports().await?;
        // Whoever made one meanwhile held that, and what is left of one may be just going.
        self.wait_void(&home, order).await;
        if home.is_made() && !self.may_be_replaced(&home) {
            return Err(MachineError::Exists { name: name.clone() }.into());
        }
        self.check_network(order)?;
        let inside = order.guest_ports.iter().map(|port| Forward { host_port: 0, guest_port: *port }).collect();
        let configuration = MachineConfiguration {
            memory_bytes: order.memory_bytes,
            processors: order.processors,
            disk_bytes: order.disk_bytes,
            postgresql: order.postgresql,
            checkpoints: true,
            silent_after_s: order.silent_after_s,
            end_when_silent: order.end_when_silent,
            forwards: self.ports(inside, order.postgresql && order.network.is_none())?,
            network: order.network.clone(),
            ..MachineConfiguration::new(image.directory.clone())
        };
        configuration.check()?;
        configuration.check_network(qemu.version())?;
        let record = Arrival {
            token: order.which.token.clone(),
            origin: order.origin.clone(),
            keys: keys.to_owned(),
            state: ArrivalState::Begun,
            // Nothing of one that is protected here is fetched later.
            is_whole: order.protects,
            shared_disk: order.shared_disk.as_ref().and_then(|disk| self.shared(name, disk)),
            protects: order.protects,
            fence: self.fence.clone().filter(|_| order.protects && etcd.is_empty()),
            etcd,
            detection_s: order.detection_s,
            compares_disk: order.protects && order.compares_disk,
        };
        let (user, made, order) = (self.user.clone(), home.clone(), order.clone());
        let make = Arc::new(move || {
            let _alone = match made.is_made().then(|| keep_alone(&made)) {
                // It has gone meanwhile.
                Some(Err(_)) if !made.is_made() => None,
                alone => alone.transpose()?,
            };
            made.make_arriving(&image, &configuration, &record, ArrivalSecrets::of(&order), &user)
        });
        let begun = Instant::now();
        loop {
            let make = Arc::clone(&make);
            match blocking("making a machine", move || make()).await {
                // What is left of a copy of before is being removed.
                Err(MachineError::Runs { .. } | MachineError::Busy { .. }) if begun.elapsed() < VOID_TIMEOUT => {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
                made => break made?,
            }
        }
        Ok(Machine::new(home, self.user.clone()))
    }

    /// The members of the etcd that decides on which host a machine goes on, where its order says so: the same one.
    async fn check_etcd(&self, order: &ReceiveOrder, keys: &Path) -> Result<Vec<Endpoint>, MachineError> {
        if !order.asks_etcd || !order.protects {
            return Ok(Vec::new());
        }
        let refused = |reason: String| {
            let (machine, to) = (order.which.name.to_string(), "this host".to_owned());
            MachineError::Protection { machine, to, reason }
        };
        let etcd = Etcd::of(&self.etcd, keys).ok_or_else(|| {
            refused("etcd is to decide where it goes on: start `onecopy host` here with --etcd".to_owned())
        })?;
        match etcd.is_introduced(&order.which.token).await.map_err(refused)? {
            true => Ok(self.etcd.clone()),
            false => {
                Err(refused("this host's etcd (`onecopy host --etcd`) is another one than that of its host".to_owned()))
            }
        }
    }

    /// A machine of another host comes onto a bridge only where this one was told so, and in nobody's place.
    fn check_network(&self, order: &ReceiveOrder) -> Result<(), MachineError> {
        let Some(network) = &order.network else { return Ok(()) };
        let checked = self.check_allowed(network).and_then(|()| self.check_nobodys(&order.which.name, network));
        let (machine, to) = (order.which.name.to_string(), "this host".to_owned());
        checked.map_err(|reason| MachineError::Migration { machine, to, reason })
    }

    pub(super) fn check_allowed(&self, network: &BridgedNetwork) -> Result<(), String> {
        let name = &network.bridge;
        let mut allowed = self.bridges.iter().filter(|allowed| allowed.name == *name).peekable();
        match allowed.peek().is_some() {
            true if network.filter || allowed.any(|allowed| allowed.takes_unfiltered) => network.check_bridge(),
            true => Err(format!(
                "it has filter=off: start `onecopy host` here with --bridge {name},filter=off, where it may send from \
                 any card's address"
            )),
            false => Err(format!(
                "no machine of another host comes onto the bridge {name}: start `onecopy host` here with --bridge \
                 {name}, or name another one by `onecopy vm migrate --bridge`"
            )),
        }
    }

    /// No other machine of this directory has its card or address.
    pub(super) fn check_nobodys(&self, name: &MachineName, network: &BridgedNetwork) -> Result<(), String> {
        let directory = self.directory.machines();
        let names = MachineHome::names(&directory).map_err(|error| error.to_string())?;
        let card = network.card(MachineHome::of(&directory, name).root());
        for home in names.iter().filter(|other| *other != name).map(|other| MachineHome::of(&directory, other)) {
            let other = home.configuration().ok().and_then(|configuration| configuration.network);
            let Some(other) = other.filter(|other| other.bridge == network.bridge && !home.is_migrated()) else {
                continue;
            };
            let has_address = other.address.is_some()
                && other.address.map(|own| own.address) == network.address.map(|its| its.address);
            if has_address || other.card(home.root()) == card {
                return Err(format!("{} has its card or address there", home.name()));
            }
        }
        Ok(())
    }

    /// The disk of a machine that comes, where it is on storage that this host was told to have, too.
    pub(super) fn shared(&self, name: &MachineName, disk: &SharedDisk) -> Option<SharedDisk> {
        let directory = disk.directory.canonicalize().ok()?;
        let beneath = self.shared_storage.iter().find(|storage| directory.starts_with(storage))?.clone();
        let own = self.directory.machines();
        let is_own = directory.starts_with(own.canonicalize().unwrap_or(own));
        let disk = SharedDisk { directory, beneath, ..disk.clone() };
        (!is_own && disk.may_be_of(name)).then_some(disk)
    }

    /// Waits for a copy of the same machine, of before, that is void and ends.
    async fn wait_void(&self, home: &MachineHome, order: &ReceiveOrder) {
        let begun = Instant::now();
        let is_ending = || {
            let known = Arrival::of(home).ok().flatten();
            known.is_some_and(|known| known.state != ArrivalState::Here && known.origin == order.origin)
        };
        while home.is_made() && !self.may_be_replaced(home) && is_ending() && begun.elapsed() < VOID_TIMEOUT {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// What a machine has left that has gone from here and is needed no more, or that never came.
    fn may_be_replaced(&self, home: &MachineHome) -> bool {
        let is_at_rest = home.process_id().is_none() && !home.has_keeper();
        let has_gone = home.is_migrated() && !Departure::is_needed(home);
        is_at_rest && (has_gone || Arrival::is_broken_off(home))
    }

    /// Before a machine is taken: the host that it comes from must be reached, and know of it.
    pub(crate) async fn check_origin(&self, order: &ReceiveOrder, keys: &Path) -> Result<(), HostError> {
        let failed = |reason: String| {
            let (machine, to) = (order.which.name.to_string(), "this host".to_owned());
            MachineError::Migration { machine, to, reason }
        };
        let origin = &order.origin;
        match migration::ask::<Verdict>(origin, keys, &HostOrder::Verdict(order.which.clone())).await {
            Ok(Verdict::Undecided) => Ok(()),
            Ok(Verdict::Unknown) => Err(failed(format!("its host {origin} has not sent it")).into()),
            Ok(_) => Err(failed(format!("its host {origin} says that it is decided already")).into()),
            Err(reason) => {
                let remedy = "its disk would come from there: `onecopy host --machines` must run there, and --origin \
                              must name it as it is reached from here";
                Err(failed(format!("its host {origin} does not answer ({reason}); {remedy}")).into())
            }
        }
    }

    /// Removes what a machine has left that did not come, once its keeper has ended.
    pub(crate) async fn clear_arrival(&self, name: &MachineName) {
        let home = MachineHome::of(&self.directory.machines(), name);
        let begun = Instant::now();
        while home.has_keeper() && begun.elapsed() < GO_TIMEOUT {
            if matches!(Arrival::of(&home), Ok(Some(Arrival { state: ArrivalState::Here, .. }))) {
                return;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        self.clear(&home, GO_TIMEOUT).await;
    }

    /// Removes what is left of a machine that did not come, where its source says that it stays there. Until then it is
    /// by this that its source hears that it never ran here.
    pub(super) async fn clear(&self, home: &MachineHome, patience: Duration) {
        let Ok(Some(record)) = Arrival::of(home) else { return };
        let (order, begun) = (HostOrder::Verdict(record.which(home)), Instant::now());
        loop {
            if !Arrival::is_broken_off(home) || home.has_keeper() {
                return;
            }
            match migration::ask::<Verdict>(&record.origin, &record.keys, &order).await {
                Ok(Verdict::Kept) => break,
                // Nothing is here that could go on: its host may have it back.
                Ok(Verdict::Given) if record.state == ArrivalState::Begun => {
                    let machine = Machine::new(home.clone(), self.user.clone());
                    if let Err(error) = machine.discard_arrival(&record.token).await {
                        tracing::warn!(%error, "it is not written down that the machine never comes");
                    }
                    return;
                }
                Ok(Verdict::Undecided) if begun.elapsed() < patience => tokio::time::sleep(LOOK_INTERVAL).await,
                _ => return,
            }
        }
        let home = home.clone();
        // Another copy of it may be made by now, and run: nothing is stopped.
        let removed = blocking("removing a machine that did not come", move || {
            let is_same = Arrival::of(&home)?.is_some_and(|known| known.token == record.token);
            if !is_same || !Arrival::is_broken_off(&home) || home.has_keeper() {
                return Ok(());
            }
            let _alone = keep_alone(&home)?;
            home.remove_arrival(&record.token)
        })
        .await;
        if let Err(error) = removed {
            tracing::warn!(%error, "a machine that did not come has left something");
        }
    }
}

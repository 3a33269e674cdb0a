//! A machine that goes on from where another one is.

use onecopy_machine::{
    BridgedNetwork, Forward, InterfaceAddress, Machine, MachineConfiguration, MachineError, MachineHome, MachineName,
};

use super::registry::{blocking, with_card};
use super::{Machines, fork_memory};
use crate::{HostError, Progress};

/// What a fork shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fork {
    /// Its name.
    pub name: MachineName,
    /// The checkpoint at which it begins; none: it goes on from now, or from the last one of a machine that is at rest.
    pub checkpoint: Option<u64>,
    /// It shares with other forks of the checkpoint what none of them has changed in memory.
    pub shares: bool,
    /// Its address, where its parent has one on a bridge.
    pub address: Option<InterfaceAddress>,
}

impl Fork {
    /// A card of its own on the same bridge, and an address.
    fn network(&self, parents: Option<&BridgedNetwork>) -> Result<Option<BridgedNetwork>, MachineError> {
        let invalid = |reason: &str| Err(MachineError::InvalidConfiguration { reason: reason.to_owned() });
        match (parents, self.address) {
            (None, None) => Ok(None),
            (None | Some(BridgedNetwork { address: None, .. }), Some(_)) => {
                invalid("its parent has no address on a bridge that was given here; leave out --address")
            }
            (Some(BridgedNetwork { address: None, .. }), None) => {
                invalid("the address that its parent's guest has on the bridge is not known here, and would be its own")
            }
            (Some(BridgedNetwork { address: Some(_), .. }), None) => {
                invalid("two machines cannot have one address; give the fork its own: --address ADDRESS/BITS")
            }
            (Some(network), address) if address.is_some() && address == network.address => {
                invalid("that is its parent's address; give another --address")
            }
            (Some(network), address) => Ok(Some(with_card(BridgedNetwork { mac: None, address, ..network.clone() }))),
        }
    }
}

impl Machines {
    /// Makes a machine that goes on from where another one is, or was at a checkpoint, which runs on; the checkpoint's
    /// number.
    ///
    /// # Errors
    /// [`MachineError::OfCluster`], [`MachineError::Exists`], [`MachineError::NoMemory`], those of
    /// [`Machine::checkpoint`] and [`Machine::restore`]; nothing of the new machine is left then.
    /// [`MachineError::Guest`]: its guest has not got its identity; it stays, unplugged, and its keeper tries again.
    pub async fn fork(&self, parent: &MachineName, fork: &Fork, progress: &dyn Progress) -> Result<u64, HostError> {
        let name = &fork.name;
        if name.is_of_clusters() {
            return Err(MachineError::NameOfClusters { name: name.clone() }.into());
        }
        let original = self.get(parent)?;
        self.refuse_clusters(parent, "its fork would be a second server of the same name in the cluster")?;
        let configuration = original.home().configuration()?;
        let network = fork.network(configuration.network.as_ref())?;
        original.check_disk_is_here()?;
        let footprint = original.observe().await.map(|status| status.footprint).unwrap_or_default();
        let wanted = fork_memory::Wanted { count: 1, shares: fork.shares };
        fork_memory::check(parent, &configuration, wanted, &footprint)?;
        let home = MachineHome::of(&self.directory.machines(), name);
        if home.is_made() {
            return Err(MachineError::Exists { name: name.clone() }.into());
        }
        // From here on the checkpoint stays.
        let parents = original.home().clone();
        let _kept = blocking("keeping a checkpoint", move || parents.keep_for_forks()).await?;
        let parents = original.home().clone();
        let turn = blocking("waiting for another fork", move || parents.take_turn_to_fork()).await?;
        let number = match fork.checkpoint {
            None if original.process_id().is_some() || original.home().has_keeper() => {
                progress.step(format!("taking a checkpoint of {parent}"));
                original.checkpoint(None).await?.number
            }
            known => original.find_checkpoint(known)?,
        };
        drop(turn);
        progress.step(format!("starting {name} from checkpoint {number} of {parent}"));
        let was = original.home().configuration()?;
        let inside = was.forwards.iter().map(|forward| Forward { host_port: 0, ..*forward }).collect();
        let ports = self.lock_ports().await?;
        let forwards = self.ports(inside, was.postgresql && network.is_none())?;
        let configuration = MachineConfiguration { forwards, network, ..was };
        configuration.check()?;
        let (user, made, from, shares) = (self.user.clone(), home.clone(), original.home().clone(), fork.shares);
        // Its guest has its parent's name and addresses until it is told others.
        let make = move || made.make_fork(&from, &configuration, (number, shares), true, &user);
        if let Err(error) = blocking("making a machine", make).await {
            // One that is made is somebody else's, of the same name; nobody else makes one meanwhile.
            if !home.is_made() {
                remove_left(home).await;
            }
            return Err(error.into());
        }
        drop(ports);
        let machine = Machine::new(home.clone(), self.user.clone());
        if let Err(error) = machine.begin_as_fork(original.home(), number, fork.shares).await {
            remove_left(home).await;
            return Err(error.into());
        }
        if let Some(reason) = machine.status().await?.network_failure {
            let (machine, action) = (name.to_string(), "take its own identity; its card is unplugged".to_owned());
            return Err(MachineError::Guest { machine, action, reason }.into());
        }
        Ok(number)
    }
}

/// Removes a fork that was not made. One that runs all the same stays, and is there to be looked at.
async fn remove_left(home: MachineHome) {
    let removed = tokio::task::spawn_blocking(move || home.remove()).await;
    if let Ok(Err(left)) = removed {
        tracing::warn!(error = %left, "a fork that was not made is left");
    }
}

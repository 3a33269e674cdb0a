//! A guest on a disk over NBD, whose server is killed while the guest works.

use onecopy_hypervisor::configuration::{Disk as GuestDisk, DiskBackend, NbdServer};
use onecopy_tests::guest::TestGuest;

use crate::kills::work_under_kills;
use crate::nbd_server::NbdServerProcess;
use crate::served::create;

const SIZE_BYTES: u64 = 256 << 20;
/// Below it the test has seen nothing.
const KILLS_MIN: u32 = 3;

/// A guest on the NBD server sees no wrong byte when its server is killed again and again; its file system is the same
/// after trim, unmount and restart.
///
/// Spec: D5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b23_a_guest_on_the_nbd_server_sees_no_wrong_byte_when_its_server_is_killed() {
    let directory = TestGuest::directory().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("nbd.sock"));
    create(&disk, SIZE_BYTES).unwrap();
    let mut server = NbdServerProcess::start(&disk, &socket, &[]).unwrap();
    let backend = DiskBackend::Nbd { server: NbdServer::Unix(socket), export: String::new(), reconnect_delay_s: 60 };
    let guest = TestGuest::restored_with(|configuration, _| {
        configuration.disks.push(GuestDisk::new("data", backend));
        Ok(())
    })
    .await
    .unwrap();
    // A file system first: made, filled, trimmed, and there again after it was unmounted.
    guest
        .run(
            "mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt && cp -a /usr/lib/postgresql /mnt/kept && \
             cp -a /usr/lib/postgresql /mnt/gone && sync && rm -r /mnt/gone && fstrim /mnt && umount /mnt",
        )
        .await
        .unwrap();
    server.kill().unwrap();
    server.restart().unwrap();
    let check = "e2fsck -fn /dev/vdb && mount /dev/vdb /mnt && diff -r /usr/lib/postgresql /mnt/kept && umount /mnt";
    guest.run(check).await.unwrap();

    let work = "--device /dev/vdb --seconds 18 --threads 4 --alignment 512";
    work_under_kills(&guest, work, KILLS_MIN, 300..3000, |gap| {
        server.kill().unwrap();
        std::thread::sleep(gap);
        server.restart().unwrap();
    });
}

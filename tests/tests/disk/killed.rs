//! A guest on a disk over vhost-user-blk, whose server is killed while the guest works.

use onecopy_tests::guest::TestGuest;

use crate::kills::work_under_kills;
use crate::served::{Server, create};

const SIZE_BYTES: u64 = 256 << 20;
/// Below it the test has seen nothing.
const KILLS_MIN: u32 = 5;

/// Spec: D5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b45_a_guest_sees_no_wrong_byte_when_its_disks_server_is_killed_again_and_again() {
    let directory = TestGuest::directory().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("vhost.sock"));
    create(&disk, SIZE_BYTES).unwrap();
    let mut server = Server::start(&disk, &socket, &[]).unwrap();
    let backend = server.backend("data");
    let guest = TestGuest::restored_with(|configuration, _| {
        configuration.disks.push(backend);
        Ok(())
    })
    .await
    .unwrap();
    let work = "--device /dev/vdb --seconds 25 --threads 4 --alignment 512";
    work_under_kills(&guest, work, KILLS_MIN, 200..2500, |gap| {
        server.kill().unwrap();
        std::thread::sleep(gap);
        server.restart().unwrap();
    });
    // And it is a disk: a file system lives on it.
    let files = "mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt && cp -a /usr/lib/postgresql /mnt && sync && umount /mnt";
    guest.run(files).await.unwrap();
    server.kill().unwrap();
    server.restart().unwrap();
    guest
        .run("e2fsck -fn /dev/vdb && mount /dev/vdb /mnt && diff -r /usr/lib/postgresql /mnt/postgresql")
        .await
        .unwrap();
}

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Instant;

use onecopy_clone::network::keys::make_host;
use onecopy_testing::{EtcdServer, Frozen};

use super::*;

fn web() -> MachineName {
    "web".parse().unwrap()
}

fn endpoint(url: &str) -> Endpoint {
    url.parse().unwrap()
}

fn plain(urls: &[&str]) -> Etcd {
    let endpoints: Vec<Endpoint> = urls.iter().map(|url| endpoint(url)).collect();
    Etcd::of(&endpoints, "/nowhere").unwrap()
}

#[test]
fn a_member_is_a_url() {
    for (url, told) in [
        ("http://10.0.0.9", "http://10.0.0.9:2379"),
        ("https://etcd-1.example:12379/", "https://etcd-1.example:12379"),
        ("http://[fd00::9]", "http://[fd00::9]:2379"),
        ("http://[fd00::9]:1", "http://[fd00::9]:1"),
    ] {
        assert_eq!(endpoint(url).to_string(), told);
        assert_eq!(serde_json::to_value(endpoint(url)).unwrap(), told);
    }
    for url in [
        "10.0.0.9:2379",
        "http://",
        "http://a/b",
        "http://a:b@c",
        "http://a:0",
        "http://a:70000",
        "http://::1",
        "http://a\r\nb",
        "ftp://a",
        "http://[fe80::1%1]",
    ] {
        let refused = url.parse::<Endpoint>().unwrap_err();
        assert!(refused.contains("give http://HOST[:PORT]"), "{url}: {refused}");
    }
}

/// Who of the two asks first is who goes on, however they race, and whoever asks later hears the same; another copy is
/// another question.
///
/// Spec: D8
#[tokio::test]
async fn p6_etcd_gives_one_answer_to_both_hosts() {
    let server = EtcdServer::start();
    // A member that is dead costs nothing.
    let (here, there) = (plain(&[server.url()]), plain(&["http://127.0.0.1:1", server.url()]));
    here.introduce("one").await.unwrap();
    assert!(there.is_introduced("one").await.unwrap() && !there.is_introduced("another").await.unwrap());
    for round in 0..40 {
        let token = format!("{round:032x}");
        let name = web();
        let (source, copy) =
            tokio::join!(here.decide(&name, &token, Survivor::Source), there.decide(&name, &token, Survivor::Copy),);
        let decided = source.unwrap();
        assert_eq!(decided, copy.unwrap());
        for wish in [Survivor::Source, Survivor::Copy] {
            assert_eq!(here.decide(&name, &token, wish).await.unwrap(), decided);
        }
    }
    assert_eq!(there.decide(&web(), "another", Survivor::Copy).await.unwrap(), Survivor::Copy);
    assert_eq!(here.decide(&"db".parse().unwrap(), "another", Survivor::Source).await.unwrap(), Survivor::Source);

    assert_eq!(here.decided(&web(), "another").await.unwrap(), Some(Survivor::Copy));
    assert_eq!(here.decided(&web(), "a third").await.unwrap(), None);
    // Another etcd knows nothing of it, and is no member of this one.
    let other = EtcdServer::start();
    assert!(!plain(&[other.url()]).is_introduced("one").await.unwrap());
    let mixed = plain(&[server.url(), other.url()]);
    assert!(!mixed.is_introduced("one").await.unwrap());
    assert!(mixed.introduce("two").await.unwrap_err().contains("not of one cluster"));
    // One that says nothing holds nobody for long, and what was decided is there still when it goes on.
    let frozen = Frozen::of([server.process()]);
    let begun = Instant::now();
    let reason = here.decide(&web(), "another", Survivor::Source).await.unwrap_err();
    assert!(reason.contains("no answer within 3 s") && begun.elapsed() < ANSWER_TIMEOUT * 3, "{reason}");
    drop(frozen);
    assert_eq!(here.decide(&web(), "another", Survivor::Source).await.unwrap(), Survivor::Copy);
}

/// Over TLS a host shows its keys, and etcd its own, of the same authority.
///
/// Spec: D8
#[tokio::test]
async fn p6_etcd_is_asked_with_the_hosts_keys() {
    let directory = tempfile::tempdir().unwrap();
    let addresses = ["127.0.0.1".to_owned()];
    let host = |authority: &str, name: &str| make_host(&directory.path().join(authority), name, &addresses).unwrap();
    let (own, of_etcd, stranger) = (host("ca", "one"), host("ca", "etcd"), host("other", "one"));
    let server = EtcdServer::encrypted(&of_etcd);
    let by = |keys: &PathBuf| Etcd::of(&[endpoint(server.url())], keys).unwrap();
    assert_eq!(by(&own).decide(&web(), "one", Survivor::Copy).await.unwrap(), Survivor::Copy);
    let reason = by(&stranger).is_introduced("one").await.unwrap_err();
    assert!(reason.contains("certificate"), "{reason}");
    let unencrypted = server.url().replace("https", "http");
    let reason = plain(&[&unencrypted]).is_introduced("one").await.unwrap_err();
    assert!(reason.contains("does not answer"), "{reason}");
}

/// Whatever listens in etcd's place decides nothing, and costs no memory and no time without end.
///
/// Spec: D8
#[tokio::test]
async fn p6_who_is_not_etcd_decides_nothing() {
    let answers = |head: &str, body: &str| format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let of = |responses: &str| format!("{{\"header\":{{\"cluster_id\":\"1\"}},\"responses\":[{responses}]}}");
    let pair = |value: &str| of(&format!("{{\"response_range\":{{\"kvs\":[{{\"value\":\"{value}\"}}]}}}}"));
    for (answer, reason) in [
        (answers("200 OK", "{}"), "what etcd does not"),
        (answers("200 OK", &of("")), "nobody of us has written"),
        (answers("200 OK", &pair("bm8=")), "nobody of us has written"),
        (answers("200 OK", &pair("%%")), "nobody of us has written"),
        (answers("503 Service Unavailable", "no \u{1b}[31mleader"), "503"),
        (answers("200 OK", &" ".repeat((64 << 10) + 1)), "too long"),
        ("SSH-2.0-x\r\n".to_owned(), "does not speak HTTP"),
        (String::new(), "does not speak HTTP"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let what: String = answer.chars().take(120).collect();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).unwrap();
            let _ = stream.write_all(answer.as_bytes());
        });
        let refused = plain(&[&format!("http://{address}")]).decide(&web(), "one", Survivor::Copy).await.unwrap_err();
        assert!(refused.contains(reason) && !refused.contains('\u{1b}'), "{what}: {refused}");
        answering.join().unwrap();
    }
    // Where nobody waits for the rest of an answer without end.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = plain(&[&format!("http://{}", listener.local_addr().unwrap())]);
    assert!(silent.is_introduced("one").await.unwrap_err().contains("no answer within"));
}

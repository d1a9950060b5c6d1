"""The page that `report` fills and `page_server` serves: markup, style and the script that draws."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>/*TITLE*/</title>
<style>
 body{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:24px auto;max-width:1560px;padding:0 16px}
 h1{font-size:22px;margin:0 0 4px} h2{font-size:16px;margin:26px 0 6px} .sub{color:#57606a;margin:0 0 14px}
 canvas{width:100%;display:block;border:1px solid #d0d7de;border-radius:4px}
 table{border-collapse:collapse;font-variant-numeric:tabular-nums} td,th{padding:3px 12px 3px 0;text-align:right} td:first-child,th:first-child{text-align:left}
 th{color:#57606a;font-weight:500;border-bottom:1px solid #d0d7de} .chip{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
 .legend span{margin-right:16px;white-space:nowrap} .ok{color:#116329} .bad{color:#b31d28} #tip{position:fixed;background:#1b1f24;color:#fff;padding:4px 8px;border-radius:4px;
 font-size:12px;pointer-events:none;display:none;max-width:420px} ul{margin:4px 0;padding-left:18px} .hint{color:#57606a;font-size:12px;margin:4px 0}
 #checks ul{list-style:none;padding-left:0} .wide{overflow-x:auto} .wide td{white-space:nowrap} .wide th{vertical-align:bottom} .jobs th:nth-child(5){text-align:left} .jobs td:nth-child(5){white-space:normal;text-align:left;min-width:90px} button{font:12px system-ui,sans-serif;margin-right:4px} dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;font-size:12px;color:#57606a;margin:8px 0}
 dt{font-weight:600} dd{margin:0} .tick{display:inline-block;width:0;height:0;border:5px solid transparent;border-top-color:#d1242f;border-bottom:0;margin-right:6px;vertical-align:1px}
</style></head><body>
<h1 id="title"></h1><p class="sub" id="about"></p><p class="sub" id="sub"></p>
<div id="now"></div><div id="compared"></div>
<h2 id="over"></h2><p class="legend" id="legend"></p><canvas id="gpus"></canvas>
<p class="hint">Drag to zoom, double-click to reset; point at a bar or a red mark to read what it is.</p>
<h2>Generation demand (samples still to be generated)</h2><canvas id="demand"></canvas>
<h2 id="heldhead"></h2><canvas id="share"></canvas>
<h2 id="handhead"></h2><canvas id="hand"></canvas>
<h2>Pipelines</h2><table id="table"></table>
<div id="why"><h2>Decisions</h2><p class="hint"><input id="find" type="search" placeholder="pipeline or word"> The newest first, in the scheduler's own words.</p><ul id="decisions"></ul></div>
<h2>Checked invariants</h2><div id="checks"></div>
<div id="tip"></div>
<script>
let D=/*DATA*/null;
let N=D.pipelines.length;const $=id=>document.getElementById(id);
const esc=t=>String(t).replace(/[&<>"]/g,c=>({"&":"&amp;","<":"&lt;",">":"&gt;",'"':"&quot;"})[c]);
const HSL=[[212,62,58],[350,62,60],[140,42,44],[32,84,54],[270,45,62],[184,62,40],[318,55,68],[50,82,44],[18,40,40],[228,48,40],[84,48,36],[296,60,32]];
const tone=i=>i<HSL.length?HSL[i]:[(i*137.5+20)%360,i%2?34:70,i%3?52:66];
const color=(i,k)=>{const [h,s,l]=tone(i);return k==="generate"?`hsl(${h} ${s}% ${l}%)`:k==="train"?`hsl(${h} ${s}% ${Math.max(l-24,16)}%)`:k==="init"?`hsl(${h} ${s*.3}% 46%)`:k==="fenced"?"#f3c9c9":k==="quarantined"?"#3d1f1f":k==="cooling"?"#f6f0d8":`hsl(${h} ${s}% 87%)`};
// #from-to shows these seconds, for links.
const asked=location.hash.match(/^#([0-9.]+)-([0-9.]+)$/);let view=asked?[+asked[1],Math.min(+asked[2],D.end||1)]:[0,D.end||1];
const pad={l:74,r:26,t:10,b:22};
function setup(id,h){const c=$(id),r=window.devicePixelRatio||1,w=c.clientWidth||1100;c.width=w*r;c.height=h*r;c.style.height=h+"px";const g=c.getContext("2d");g.scale(r,r);
 g.clearRect(0,0,w,h);g.font="11px system-ui,sans-serif";return [g,w,h]}
const X=(t,w)=>pad.l+(t-view[0])/(view[1]-view[0])*(w-pad.l-pad.r);
function nice(x){const p=10**Math.floor(Math.log10(x||1));for(const m of [1,2,5,10])if(m*p>=x)return m*p;return 10*p}
function axis(g,w,h){g.fillStyle="#57606a";g.strokeStyle="#eaeef2";g.textAlign="center";const s=nice((view[1]-view[0])/9);
 for(let t=Math.ceil(view[0]/s)*s;t<=view[1];t+=s){const x=X(t,w);g.beginPath();g.moveTo(x,pad.t);g.lineTo(x,h-pad.b);g.stroke();g.fillText((s<1?t.toFixed(1):t.toFixed(0))+" s",x,h-8)}}
function drawGpus(){const n=D.rows.length,row=n<=4?46:n<=16?26:n<=64?12:n<=256?4:Math.max(1,900/n),H=pad.t+pad.b+row*n,[g,w,h]=setup("gpus",H);axis(g,w,h);
 for(const [a,b,s,e,p,k] of D.bars){if(e<view[0]||s>view[1])continue;const x=Math.max(X(s,w),pad.l),y=pad.t+a*row,ww=Math.max(Math.min(X(e,w),w-pad.r)-x,0.6),hh=(b-a+1)*row-(row>3?1:0);
  g.fillStyle=color(p,k);g.fillRect(x,y,ww,hh);
  if(k==="train"&&row>6){g.save();g.beginPath();g.rect(x,y,ww,hh);g.clip();g.strokeStyle="rgba(255,255,255,.22)";for(let q=x-hh;q<x+ww;q+=7){g.beginPath();g.moveTo(q,y+hh);g.lineTo(q+hh,y);g.stroke()}g.restore()}
  if((k==="fenced"||k==="quarantined"||k==="cooling")&&row>3){g.save();g.beginPath();g.rect(x,y,ww,hh);g.clip();g.strokeStyle=k==="cooling"?"#d9cd97":"#d1242f";for(let q=x-hh;q<x+ww;q+=9){g.beginPath();g.moveTo(q,y);g.lineTo(q+hh,y+hh);g.stroke()}g.restore();continue}
  if(row>10&&ww>46){g.fillStyle=k==="handover"?"#444":"#fff";g.textAlign="left";g.save();g.beginPath();g.rect(x,y,ww-2,hh);g.clip();g.fillText(k==="train"?(ww>g.measureText(D.pipelines[p]+" trains").width+8?D.pipelines[p]+" trains":""):k==="init"?"init":D.pipelines[p],x+4,y+Math.min(row,hh)/2+4);g.restore()}}
 g.fillStyle="#57606a";g.textAlign="right";const every=Math.ceil(14/row);for(let i=0;i<n;i+=every)g.fillText(D.unit+" "+D.rows[i].replace("'s training turn"," trains"),pad.l-6,pad.t+i*row+Math.min(row/2+4,12));
 g.fillStyle="#d1242f";for(const [t] of D.faults){const x=X(t,w);if(x>=pad.l&&x<=w-pad.r){g.beginPath();g.moveTo(x-5,0);g.lineTo(x+5,0);g.lineTo(x,pad.t);g.fill()}}
 $("gpus").row=row}
function drawCurves(id,curves){const [g,w,h]=setup(id,190);axis(g,w,h);let top=0;for(const c of curves)for(const p of c)top=Math.max(top,p[1]);top=nice(top||1);const Y=v=>h-pad.b-v/top*(h-pad.t-pad.b);
 g.fillStyle="#57606a";g.textAlign="right";for(const v of [0,top/2,top])g.fillText(v,pad.l-6,Y(v)+4);
 curves.forEach((c,i)=>{g.strokeStyle=color(i,"generate");g.lineWidth=N>30?0.6:1.6;g.save();g.beginPath();g.rect(pad.l,0,w-pad.l-pad.r,h);g.clip();g.beginPath();let last=0;g.moveTo(X(0,w),Y(0));
  for(const [t,v] of c){g.lineTo(X(t,w),Y(last));g.lineTo(X(t,w),Y(v));last=v}g.lineTo(X(D.end,w),Y(last));g.stroke();g.restore()})}
function drawHand(){const [g,w,h]=setup("hand",176),v=D.handovers;if(!v.length){g.fillText("none",pad.l,30);return}
 const base=h-40,lo=Math.log10(Math.max(v[0],0.001)),hi=Math.log10(Math.max(v[v.length-1],0.01))+1e-9,B=60,bins=new Array(B).fill(0);
 for(const s of v)bins[Math.min(B-1,Math.floor((Math.log10(Math.max(s,0.001))-lo)/(hi-lo)*B))]++;const top=Math.max(...bins),bw=(w-pad.l-pad.r)/B;
 g.fillStyle="#6e7781";bins.forEach((n,i)=>g.fillRect(pad.l+i*bw,base-n/top*(base-pad.t),bw-1,n/top*(base-pad.t)));
 g.textAlign="center";g.fillStyle="#57606a";for(const t of [0.001,0.01,0.1,1,10,100]){const x=pad.l+(Math.log10(t)-lo)/(hi-lo)*(w-pad.l-pad.r);if(x>=pad.l&&x<=w-pad.r)g.fillText(t+" s",x,base+14)}
 for(const [q,n] of [[D.handoverP50,"p50"],[D.handoverP99,"p99"]]){const x=pad.l+(Math.log10(Math.max(q,0.001))-lo)/(hi-lo)*(w-pad.l-pad.r);
  g.strokeStyle="#d1242f";g.beginPath();g.moveTo(x,pad.t);g.lineTo(x,base);g.stroke();g.fillStyle="#d1242f";g.textAlign=x>w-120?"right":"left";g.fillText(` ${n} ${q.toFixed(2)} s `,x+3,pad.t+10)}
 g.textAlign="right";g.fillStyle="#57606a";g.fillText(top,pad.l-6,pad.t+8);g.fillText(0,pad.l-6,base);
 g.textAlign="center";g.fillText("seconds a hand-over took (logarithmic)",(pad.l+w-pad.r)/2,h-8);g.save();g.translate(14,(pad.t+base)/2);g.rotate(-Math.PI/2);g.fillText("hand-overs",0,0);g.restore()}
function all(){drawGpus();drawCurves("demand",D.demand);drawCurves("share",D.share);drawHand()}
const pct=x=>(100*x).toFixed(0)+" %";
const rows=t=>"<div class=wide><table>"+t.map((l,i)=>"<tr>"+l.map(c=>i?`<td>${esc(c)}</td>`:`<th>${esc(c)}</th>`).join("")+"</tr>").join("")+"</table></div>";
const token=new URLSearchParams(location.search).get("token");
function jobs(){const acts=D.acts&&D.live&&token;return "<div class='wide jobs'><table><tr>"+[...D.columns,"",""].map(c=>`<th>${esc(c)}</th>`).join("")+"</tr>"
 +D.standings.map((l,i)=>{const at="jobs/"+encodeURIComponent(l[0]);return "<tr>"+l.map((c,k)=>`<td>${esc(c)}${k===4&&D.why[i]?`<div class=hint>${esc(D.why[i])}</div>`:""}</td>`).join("")
 +`<td>${D.reports[i]?`<a href="${esc(at)}/files/report.html">report</a> `:""}<a href="${esc(at)}/files/">logs</a></td>`
 +`<td>${acts&&!D.ended[i]?`<button data-job="${esc(l[0])}" data-what="drain">drain</button><button data-job="${esc(l[0])}" data-what="cancel">cancel</button>`:""}</td></tr>`}).join("")+"</table></div><p class=hint id=said></p>"}
document.addEventListener("click",async e=>{const {job,what}=e.target.dataset||{};if(!job||!confirm(`${what} ${job}?`))return;
 const said=await fetch(`jobs/${encodeURIComponent(job)}/${what}`,{method:"POST",headers:{Authorization:`Bearer ${token}`}});$("said").textContent=await said.text()});
function decide(){const word=$("find").value.toLowerCase(),found=D.decisions.filter(d=>!word||d[2].toLowerCase().includes(word)).slice(-200).reverse();
 $("why").hidden=!D.decisions.length;$("decisions").innerHTML=found.map(d=>`<li><span class="hint">${d[0].toFixed(1)} s${d[1]<0?"":", plan "+d[1]}</span> ${esc(d[2])}</li>`).join("")}
$("find").oninput=decide;
function texts(){
$("title").textContent=D.title;$("over").textContent=D.unit+"s over time";$("heldhead").textContent=D.unit+"s held";$("handhead").textContent=`Hand-overs: from the decision to give ${D.unit}s until they are used`;$("about").textContent=D.about;
$("sub").textContent=`${N} pipelines, ${D.gpus} ${D.unit}s, ${D.end.toFixed(0)} s. `+(D.busy===null?"":`${D.unit}s busy (a trainer works, or an engine has requests) ${pct(D.busy)}, `)
 +`${D.busy===null?D.unit+"s ":""}held (by a trainer or an active rank, with work or without) ${pct(D.held)} of the time. `
 +`${D.handovers.length} hand-overs, p50 ${D.handoverP50.toFixed(2)} s, p99 ${D.handoverP99.toFixed(2)} s.`;
$("now").innerHTML=(D.began?`<p class="hint">began ${new Date(1000*D.began).toLocaleString()}${D.live?"; live":""}</p>`:"")+(D.standings.length?jobs():"")+(D.measured?`<p>${esc(D.measured)}</p>`:"");
if(D.wayTable.length)$("compared").innerHTML=`<h2>Ways of running these jobs (${D.runs}; below: the first run of time_sharing)</h2>`+rows(D.wayTable)+(D.jobTable.length>1?"<h2>Jobs</h2>"+rows(D.jobTable):"")
 +(D.notes.length?"<ul>"+D.notes.map(n=>`<li>${esc(n)}</li>`).join("")+"</ul>":"")+"<details open><summary class=hint>What the columns mean</summary><dl>"+D.legend.map(([w,m])=>`<dt>${esc(w)}</dt><dd>${esc(m)}</dd>`).join("")+"</dl></details>";
const phase=(style,text)=>`<span><i class="chip" style="${style}"></i>${text}</span>`;
const phases=phase("background:hsl(0 0% 58%)","generating")+phase("background:repeating-linear-gradient(135deg,hsl(0 0% 26%) 0 3px,hsl(0 0% 45%) 3px 5px)","training")
 +phase("background:hsl(0 0% 46%)","first start")+phase("background:hsl(0 0% 86%)","handing over (drain, sleep, wake, sync)")+phase("background:#fff;box-shadow:inset 0 0 0 1px #d0d7de","idle")
 +(["fenced","quarantined","cooling"].filter(k=>D.bars.some(b=>b[5]===k)).map(k=>phase(`background:repeating-linear-gradient(45deg,${color(0,k)} 0 3px,${k==="cooling"?"#d9cd97":"#d1242f"} 3px 4px)`,{fenced:"cut off, its processes being ended",quarantined:"quarantined: could not be freed",cooling:"closed to one pipeline whose rank cools off"}[k])).join(""))
 +(D.faults.length?`<span><i class="tick"></i>fault</span>`:"");
$("legend").innerHTML=(N<=24?D.pipelines.map((n,i)=>`<span><i class="chip" style="background:${color(i,"generate")}"></i>${esc(n)}</span>`).join(""):`<span>${N} pipelines, one hue each</span>`)+"<br>"+phases;
$("table").innerHTML=`<tr><th>pipeline</th><th>steps</th><th>${esc(D.unit)}-seconds held</th>${D.decisions.length?`<th>entitled to ${esc(D.unit)}s</th>`:""}</tr>`+D.pipelines.slice(0,60).map((n,i)=>`<tr><td><i class="chip" style="background:${color(i,"generate")}"></i>${esc(n)}</td><td>${D.steps[i]}</td><td>${D.gpuSeconds[i].toLocaleString("en")}</td>${D.decisions.length?`<td>${D.entitled[i]}</td>`:""}</tr>`).join("");
$("checks").innerHTML=!D.checked?`<p class="hint">The record is checked when the pool is closed.</p>`:D.violations.length?`<p class="bad">${D.violations.length} violation(s), first ones:</p><ul>${D.violations.map(v=>`<li class="bad">${esc(v)}</li>`).join("")}</ul>`
 :`<p class="ok">No violation found.</p><ul>${Object.entries(D.invariants).map(([n,t])=>`<li>${n}. ${t}</li>`).join("")}</ul>`;
decide()}
const G=$("gpus");let drag=null;const T=e=>{const r=G.getBoundingClientRect();return view[0]+(e.clientX-r.left-pad.l)/(r.width-pad.l-pad.r)*(view[1]-view[0])};
G.onmousedown=e=>{drag=T(e)};G.onmouseup=e=>{if(drag!==null){const t=T(e),a=Math.max(0,Math.min(t,drag)),b=Math.min(D.end,Math.max(t,drag));if(b-a>(view[1]-view[0])/100){view=[a,b];all()}}drag=null};
G.ondblclick=()=>{view=[0,D.end];all()};
const tell=(e,text)=>{const tip=$("tip");if(!text){tip.style.display="none";return}tip.style.display="block";tip.style.left=Math.min(e.clientX+12,innerWidth-440)+"px";tip.style.top=e.clientY+12+"px";tip.textContent=text};
G.onmousemove=e=>{const r=G.getBoundingClientRect(),t=T(e),y=e.clientY-r.top;if(y<pad.t){const near=(view[1]-view[0])/(r.width-pad.l-pad.r)*5;
  return tell(e,D.faults.filter(f=>Math.abs(f[0]-t)<=near).slice(0,5).map(f=>`${f[0].toFixed(2)} s: ${f[1]}`).join("; "))}
 const gpu=Math.floor((y-pad.t)/G.row);let hit=null;for(const b of D.bars)if(b[0]<=gpu&&gpu<=b[1]&&b[2]<=t&&t<=b[3])hit=b;
 tell(e,hit&&`${D.unit} ${D.rows[gpu]}: ${hit[6]}, ${hit[2].toFixed(2)} to ${hit[3].toFixed(2)} s (${(hit[3]-hit[2]).toFixed(2)} s)`)};
G.onmouseleave=()=>{$("tip").style.display="none"};
onresize=all;texts();all();
async function again(){try{const said=await fetch("data.json"+location.search);if(said.ok){const whole=view[0]===0&&view[1]>=D.end;D=await said.json();N=D.pipelines.length;
 if(whole)view=[0,D.end||1];texts();all()}}catch(lost){$("sub").textContent="the pool does not answer; this is what it was when it last did"}if(D.live)setTimeout(again,2000)}
if(D.live)setTimeout(again,2000);
</script></body></html>
"""
